"""An option is one field of ``EngineConfig``: every place where options appear is made from it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import click
import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.cli import options as cli_options
from fused_kv_llm.config import EngineConfig, Option, option_of
from fused_kv_llm.engine import constructor
from fused_kv_llm.errors import ConfigError
from langchain_fused_kv import ChatFusedKV
from langchain_fused_kv import FusedKVLLM as LangChainLLM
from llama_index_fused_kv import FusedKVLLM as LlamaIndexLLM

DOCS = Path(__file__).parents[2] / "docs"
FIELDS = EngineConfig.model_fields


class MoreOptions(EngineConfig):
    """A configuration with one option more."""

    warm_up: Annotated[int, Option(unit="prompts")] = Field(default=3, frozen=True)
    """How many prompts are answered before the first one."""


@pytest.fixture(name="docs_options")
def _docs_options() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_options", DOCS / "options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_is_described() -> None:
    assert [name for name, field in FIELDS.items() if not field.description] == []
    assert len(FIELDS) >= 18


def test_the_constructor_shows_the_options() -> None:
    _, *parameters = inspect.signature(FusedKVEngine.__init__).parameters.values()
    assert {parameter.name: parameter.default for parameter in parameters} == {
        name: field.default for name, field in FIELDS.items()
    }
    kinds = {parameter.name: parameter.kind for parameter in parameters}
    assert kinds.pop("model") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", [LangChainLLM, ChatFusedKV, LlamaIndexLLM])
def test_framework_classes_have_the_options(kind: Any) -> None:
    for name, field in FIELDS.items():
        theirs = kind.model_fields[name]
        assert (theirs.default, theirs.description, theirs.annotation) == (
            field.default,
            field.description,
            field.annotation,
        )
        assert theirs.frozen == field.frozen
        assert name in inspect.signature(kind).parameters


def _command(*path: str) -> click.Command:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command


COMMANDS = {
    ("ingest",): {"recompute_ratio", "selector", "store_misses"},
    ("ask",): {name for name in FIELDS if option_of(name).identity} - {"model"},
    ("calibrate",): {"recompute_ratio", "store_misses"},
}


@pytest.mark.parametrize("path", COMMANDS)
def test_commands_have_the_options(path: tuple[str, ...]) -> None:
    parameters: dict[str, Any] = {parameter.name: parameter for parameter in _command(*path).params}
    expected = {name for name in FIELDS if option_of(name).on_command_line} - COMMANDS[path]
    assert expected <= set(parameters)
    assert not COMMANDS[path] & set(parameters)
    # `ask --model` and `calibrate --selector` are options of their own.
    for name in expected - {"model", "selector"}:
        assert str(parameters[name].default).removeprefix("./") == str(FIELDS[name].default).removeprefix("./")
        assert parameters[name].help.split() == (FIELDS[name].description or "").replace("``", "").split()
        assert f"--{name.replace('_', '-')}" in parameters[name].opts


def test_the_table_is_that_of_the_options(docs_options: ModuleType) -> None:
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    made = docs_options.table()
    assert docs_options.page_with(made, page) == page, "run: python docs/options.py"
    assert all(f"| `{name}`" in made for name in FIELDS)


def test_a_new_option_is_in_every_place(docs_options: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (constructor, cli_options, docs_options):
        monkeypatch.setattr(module, "EngineConfig", MoreOptions)
    monkeypatch.setattr("fused_kv_llm.config.engine.EngineConfig", MoreOptions)

    def engine(self: Any, model: Any = "", **options: Any) -> None: ...

    assert inspect.signature(constructor.show_options(engine)).parameters["warm_up"].default == 3
    assert (
        "| `warm_up` | `--warm-up` | int | `3` | prompts | How many prompts are answered before the first one. |"
        in docs_options.table()
    )
    given = []

    def command(**options: Any) -> None:
        given.append(options)

    commands = typer.Typer()
    commands.command()(cli_options.takes_engine_options()(command))
    assert CliRunner().invoke(commands, ["--warm-up", "5", "--ratio", "0.5"]).exit_code == 0
    assert (given[0]["warm_up"], given[0]["recompute_ratio"], given[0]["policy"]) == (5, 0.5, "pgdsf")
    assert set(given[0]) == {name for name in MoreOptions.model_fields if option_of(name).on_command_line}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bites": 3}, "no option 'memory_bites'; did you mean 'memory_bytes'"),
        ({"nothing": 1}, "its options: model, tokenizer, kv_dir"),
        ({"store_misses": "perhaps"}, "store_misses='perhaps' cannot work"),
        ({"num_neighbours": True}, "num_neighbours=True is not a whole number"),
        ({"tenant": None, "disk_bytes": "lots"}, "disk_bytes='lots' is not a size.*tenant=None cannot work"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"remote cannot work") as caught:
        EngineConfig(remote=["redis://:hunter2@host"])  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(EngineConfig(remote="redis://:hunter2@host"))
