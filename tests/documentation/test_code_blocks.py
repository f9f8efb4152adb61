"""Every code block of the documentation runs as it stands, page by page, with the real model."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from llama_index.core import Settings
from opentelemetry import trace
from opentelemetry.util._once import Once
from typer.testing import CliRunner

from fused_kv_llm.cli import app
from fused_kv_llm.engine import parts as engine_parts
from fused_kv_llm.model import LoadedModel, load_model
from fused_kv_llm.offline import embedder

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```[ {.]*(\w*)[ }]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# They ask many questions, or serve until they are told to end; their own tests run them.
PARSED_ONLY = {"calibrate", "demo", "serve", "size"}
# It needs a cluster; tests/scale runs it on this machine.
ON_A_CLUSTER = "--ray"
SHOWN = {
    "quickstart-langchain.md": r"[1-9]\d\d prompt tokens came from stored KV",
    "quickstart-llama-index.md": r"[1-9]\d\d prompt tokens came from stored KV",
    "troubleshooting.md": r"line breaks escaped",
    "ingestion.md": r"'num_deleted': 1",
    "models.md": r"is not supported",
    "reports.md": r"fused_kv\.request [1-9]",
}


@dataclass(frozen=True)
class Block:
    """One fenced block, and where its text begins."""

    page: Path
    line: int
    language: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [Block(page, text.count("\n", 0, match.start()) + 2, match[1], match[2]) for match in found]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2-135m")


@pytest.fixture(autouse=True)
def _surroundings(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, one model and one embedder for all pages, and globals that are put back."""
    monkeypatch.chdir(tmp_path)
    Path("my_documents").mkdir()
    Path("my_documents/fleet.txt").write_text(
        "The Aldebaran carries 412 passengers and 96 cars, more than any other ferry."
    )
    Path("my_questions.txt").write_text("How many cars?\n")

    def load(model: Any, **options: Any) -> LoadedModel:
        return loaded if model == "smollm2-135m" else load_model(model, **options)

    monkeypatch.setattr(engine_parts, "load_model", load)
    monkeypatch.setattr(embedder, "_load_minilm", functools.cache(embedder._load_minilm))
    for name, value in list(vars(Settings).items()):
        monkeypatch.setattr(Settings, name, value)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "documentation"}
    for block in blocks_of(page):
        if block.code.startswith("--8<--"):
            assert (ROOT / shlex.split(block.code)[1]).is_file()
        elif block.language == "python":
            run_python(block, block.code, names)
        elif block.language == "diff":
            run_python(block, after(block.code), names)
        elif block.language == "console":
            for line in block.code.replace("\\\n", " ").splitlines():
                run_command(shlex.split(line, comments=True))
        else:
            assert block.language in ("", "text"), f"{page}:{block.line} is a block of {block.language}"
    assert re.search(SHOWN.get(page.name, ""), capsys.readouterr().out)


def run_python(block: Block, code: str, names: dict[str, Any]) -> None:
    # Line numbers of the page, so that a failure points into it.
    exec(compile("\n" * (block.line - 1) + code, str(block.page), "exec"), names)


def after(diff: str) -> str:
    """Return what a diff leaves."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def run_command(words: list[str]) -> None:
    """Run a command of the project; of the others check what they name."""
    if words[0] == "fused-kv":
        run_cli(words[1:])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[:2] == ["pip", "install"], f"nobody knows whether {shlex.join(words)} works"
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words:
            assert set(filter(None, re.sub(r"^.*?\[(.*)\]$|^.*$", r"\1", word).split(","))) <= set(extras)


def run_cli(arguments: list[str]) -> None:
    if arguments[0] in PARSED_ONLY or ON_A_CLUSTER in arguments:
        command = typer.main.get_command(app).commands[arguments[0]]  # type: ignore[attr-defined]
        command.make_context(arguments[0], arguments[1:])
        return
    short = ["--max-tokens", "4"] if arguments[0] == "ask" and "--max-tokens" not in arguments else []
    result = CliRunner().invoke(app, [*arguments, *short])
    assert result.exit_code == 0, result.output


def test_the_readers_of_blocks_can_fail() -> None:
    assert after("-old\n+new\n same\n\n") == "new\nsame\n\n"
    with pytest.raises(AssertionError):
        run_command(["pip", "install", ".[nothing]"])
    with pytest.raises(AssertionError):
        run_command(["make", "coffee"])
    with pytest.raises(SystemExit):
        typer.main.get_command(app).commands["calibrate"].main(["--no-such-option"])  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in PAGES[1:] if f" {page.relative_to(ROOT / 'docs')}" not in navigation]
    assert missing == []
