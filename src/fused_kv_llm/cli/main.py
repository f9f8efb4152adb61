"""The command line: ``fused-kv ingest | ask | demo | calibrate | store``. The only place that prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel

from fused_kv_llm.cli.calibrate import calibrate_app
from fused_kv_llm.cli.layers import add_layers_command
from fused_kv_llm.cli.options import DiskBytes, KvDtype, Policy, Remote
from fused_kv_llm.cli.store import store_app
from fused_kv_llm.cli.terminal import FriendlyGroup, out, quiet_libraries
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.errors import MissingExtraError

if TYPE_CHECKING:
    from fused_kv_llm.demo import Rag, Row
    from langchain_fused_kv import FusedKVLLM

__all__ = ["app"]

_MODEL = "smollm2-135m"

app = typer.Typer(
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Answers from your files, sooner: the KV of every passage is computed once, when it is ingested.",
)
app.add_typer(store_app, name="store")
app.add_typer(calibrate_app, name="calibrate")
add_layers_command(calibrate_app)

KvDir = Annotated[Path, typer.Option(help="Folder of the KV store and of the passage index.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; chosen by the hardware.")]
Ratio = Annotated[float, typer.Option(help="Share of the passages' tokens to recompute, 0 to 1.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
ChunkChars = Annotated[int, typer.Option(help="Longest passage, in characters.")]


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files (.txt, .md, .pdf) and folders of them.")],
    *,
    kv_dir: KvDir = Path("./kv"),
    model: Annotated[str, typer.Option(help="Embedded model, hub id or local folder.")] = _MODEL,
    dtype: Dtype = None,
    chunk_chars: ChunkChars = 1000,
    refresh: Annotated[bool, typer.Option(help="Prefill passages again whose similar passages have changed.")] = False,
    kv_dtype: KvDtype = "auto",
    disk_bytes: DiskBytes = None,
    policy: Policy = "pgdsf",
    remote: Remote = None,
) -> None:
    """Read files, split them into passages, and store the KV and the embedding of each passage.

    Running it again skips what is stored already and replaces the passages of files that have changed.
    """
    store: dict[str, Any] = {"kv_dtype": kv_dtype, "disk_bytes": disk_bytes, "policy": policy, "remote": remote}
    _ingest(paths, kv_dir, model, dtype, chunk_chars, refresh=refresh, **store).close()


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    *,
    kv_dir: KvDir = Path("./kv"),
    k: Annotated[int, typer.Option(min=1, help="Passages to put into the prompt, if they fit.")] = 5,
    ratio: Ratio = 0.15,
    selector: Annotated[str, typer.Option(help="The rule that picks the tokens to recompute.")] = DEFAULT_SELECTOR,
    model: Annotated[str | None, typer.Option(help="Defaults to the model of the ingestion.")] = None,
    max_tokens: MaxTokens = 128,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer without stored KV.")] = False,
    disk_bytes: DiskBytes = None,
    policy: Policy = "pgdsf",
    remote: Remote = None,
) -> None:
    """Answer a question from the ingested files."""
    from fused_kv_llm.demo import MiniLM, PassageIndex, Rag

    quiet_libraries()
    index = PassageIndex.open(kv_dir, MiniLM())
    dtype = index.info.dtype if model in (None, index.info.model) else None
    with _load(
        model or index.info.model,
        kv_dir,
        dtype,
        recompute_ratio=ratio,
        selector=selector,
        max_tokens=max_tokens,
        kv_dtype=index.info.kv_dtype,
        disk_bytes=disk_bytes,
        policy=policy,
        remote=remote,
    ) as llm:
        _answer(Rag(index, llm, k=k), llm, question, compared=compare)


@app.command()
def demo(
    *,
    kv_dir: Annotated[Path | None, typer.Option(help="Defaults to the user's cache folder.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Passages per prompt.")] = 20,
    questions: Annotated[int, typer.Option(min=1, max=12, help="How many questions to ask.")] = 3,
    ratio: Ratio = 0.15,
    max_tokens: MaxTokens = 48,
) -> None:
    """Ingest the handbook of a fictional ferry company and compare ways of asking about it.

    Needs no network and takes some minutes on two CPU cores, most of it for the ways it is compared with.
    """
    from fused_kv_llm.demo import MiniLM, PassageIndex, Rag, handbook_questions
    from fused_kv_llm.paths import cache_folder

    asked = handbook_questions()[:questions]
    handbook = Path(str(files("fused_kv_llm.demo") / "handbook"))
    folder = kv_dir or cache_folder() / "demo-kv"
    llm = _ingest([handbook], folder, _MODEL, None, 1000)
    with llm:
        llm.recompute_ratio, llm.max_tokens = ratio, max_tokens
        rag = Rag(PassageIndex.open(folder, MiniLM()), llm, k=k)
        compared = []
        for entry in asked:
            out.rule(escape(entry["question"]), align="left")
            compared.append(_answer(rag, llm, entry["question"], compared=True))
            out.print(f"[dim]In the handbook: {escape(entry['answer'])}[/]\n")
    _summarise(compared)


def _ingest(
    paths: Sequence[Path],
    kv_dir: Path,
    model: str,
    dtype: str | None,
    chunk_chars: int,
    *,
    refresh: bool = False,
    **store: Any,
) -> FusedKVLLM:
    from fused_kv_llm.demo import MiniLM, PassageIndex, read_passages

    quiet_libraries()
    passages = read_passages(paths, chunk_chars=chunk_chars)
    out.print(f"{len(passages)} passages, files read: {len({passage.source for passage in passages})}")
    llm = _load(model, kv_dir, dtype, **store)
    report = llm.build_kv_cache([passage.text for passage in passages], refresh=refresh)
    out.print(report.summary(), highlight=False)
    with out.status("Embedding the passages"):
        made = {"model": model, "dtype": llm.engine.dtype, "kv_dtype": llm.engine.kv_dtype}
        index = PassageIndex.update(kv_dir, passages, embedder=MiniLM(), **made)
    out.print(f"{len(index.passages)} passages can be asked about: fused-kv ask QUESTION --kv-dir {kv_dir}")
    return llm


def _load(model: str, kv_dir: Path, dtype: str | None, **options: Any) -> FusedKVLLM:
    try:
        from langchain_fused_kv import FusedKVLLM
    except ImportError as error:
        raise MissingExtraError("langchain-core", "demo") from error
    with out.status(f"Loading {model}"):
        llm = FusedKVLLM(model=model, kv_dir=kv_dir, dtype=dtype, **options)
    out.print(f"[dim]{escape(model)}: {escape(llm.engine.choice)}[/]", highlight=False)
    return llm


def _answer(rag: Rag, llm: FusedKVLLM, question: str, *, compared: bool) -> list[Row]:
    from fused_kv_llm.demo import as_table, compare, describe

    for piece in rag.chain.stream(question):
        out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    out.print()
    if llm.last_report is not None:
        out.print(f"[dim]{escape(describe(llm.last_report))}[/]", highlight=False, soft_wrap=True)
    if rag.passages_used < rag.passages_wanted:
        out.print(f"[dim]The model's context holds {rag.passages_used} passages of {rag.passages_wanted}[/]")
    if not compared:
        return []
    prompt = rag.prompt.invoke(question).to_string()
    used = llm.engine.recompute_ratio if llm.last_report is None else llm.last_report.recompute_ratio
    ratios = dict.fromkeys((0.0, used))
    with out.status("Answering again without stored KV"):
        rows = compare(llm.engine, prompt, ratios=list(ratios), selector=llm.selector, max_tokens=llm.max_tokens)
    out.print(as_table(rows))
    return rows


def _summarise(compared: Sequence[Sequence[Row]]) -> None:
    lines = []
    for same_way in zip(*compared, strict=True):
        ttft_s = statistics.median(row.ttft_s for row in same_way)
        speedup = statistics.median(row.speedup for row in same_way)
        lines.append(f"{same_way[0].name:<24} first token after {ttft_s:5.2f} s   {speedup:4.1f}x")
    title = f"Medians of {len(compared)} questions"
    out.print(Panel("\n".join(lines), title=title, title_align="left", expand=False), highlight=False)
