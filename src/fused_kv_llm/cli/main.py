"""The command line: ``fused-kv ingest | ask | explain | serve | size | demo | calibrate | store``; only it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fused_kv_llm.cli.calibrate import calibrate_app
from fused_kv_llm.cli.demo_web import serve_demo
from fused_kv_llm.cli.explain import add_explain_command
from fused_kv_llm.cli.layers import add_layers_command
from fused_kv_llm.cli.options import IDENTITY_OPTIONS, takes_engine_options
from fused_kv_llm.cli.ray_ingest import RayChoice, ingest_on_ray
from fused_kv_llm.cli.serve import add_serve_command
from fused_kv_llm.cli.size import add_size_command
from fused_kv_llm.cli.store import store_app
from fused_kv_llm.cli.terminal import FriendlyGroup, doing, out, print_data, quiet_libraries, talking_aside
from fused_kv_llm.config import DEFAULT_MODEL, RecomputeRatio
from fused_kv_llm.demo import DEMO
from fused_kv_llm.errors import ConfigError

if TYPE_CHECKING:
    from fused_kv_llm.demo import RagPrompt, Row
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.report import FusionReport

__all__ = ["app"]

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
add_serve_command(app)
add_explain_command(app)
add_size_command(app)

Ratio = Annotated[float, typer.Option(help="Share of the passages' tokens to recompute, 0 to 1.")]
MaxTokens = Annotated[int, typer.Option(help="Longest answer, in tokens.")]
ChunkChars = Annotated[int, typer.Option(help="Longest passage, in characters.")]


@app.command()
@takes_engine_options(leave_out={"recompute_ratio", "selector", "store_misses"})
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files (.txt, .md, .pdf, .csv, .html) and folders of them.")],
    *,
    chunk_chars: ChunkChars = 1000,
    refresh: Annotated[bool, typer.Option(help="Preprocess passages again whose neighbours have changed.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Compute on a Ray cluster, into the store of --remote.")] = False,
    ray_address: Annotated[str | None, typer.Option(help="Of the cluster; by default Ray starts here.")] = None,
    actors: Annotated[int | None, typer.Option(min=1, help="With --ray: processes that hold the model.")] = None,
    cpus_per_actor: Annotated[float, typer.Option(help="With --ray: cores of each.")] = 1.0,
    gpus_per_actor: Annotated[float, typer.Option(help="With --ray: GPUs of each.")] = 0.0,
    prune: Annotated[bool, typer.Option("--prune", help="With --ray: delete what is stored and not here.")] = False,
    **options: Any,
) -> None:
    """Read files, split them into passages, and store the KV and the embedding of each passage.

    Passages can be asked about as soon as their KV is stored. A second, longer pass preprocesses them for better
    answers; Ctrl-C stops it, and running the command again goes on from there. It also replaces the passages of files
    that have changed.
    """
    if ray:
        choice = RayChoice(ray_address, actors, cpus_per_actor, gpus_per_actor, prune)
        ingest_on_ray(paths, chunk_chars, choice, refresh=refresh, **options)
        return
    if prune or ray_address is not None or actors is not None:
        raise ConfigError("--prune, --ray-address and --actors are for ingestion on Ray: give --ray too")
    _ingest(paths, chunk_chars, refresh=refresh, **options).close()


@app.command()
@takes_engine_options(leave_out=IDENTITY_OPTIONS)
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    *,
    k: Annotated[int, typer.Option(min=1, help="Passages to put into the prompt, if they fit.")] = 5,
    model: Annotated[str | None, typer.Option(help="Defaults to the model of the ingestion.")] = None,
    max_tokens: MaxTokens = 128,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer without stored KV.")] = False,
    html: Annotated[Path | None, typer.Option(help="A file to write the request's report to, as a page.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; what people read goes to stderr.")
    ] = False,
    **options: Any,
) -> None:
    """Answer a question from the ingested files."""
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise ConfigError(f"--html {html} is no file in a folder that exists: name one, such as report.html")
    with talking_aside(aside=as_json):
        said = _ask(question, k, model, max_tokens=max_tokens, compare=compare, html=html, **options)
    if as_json:
        print_data(said)


def _ask(
    question: str,
    k: int,
    model: str | None,
    *,
    max_tokens: int,
    compare: bool,
    html: Path | None,
    **options: Any,
) -> dict[str, Any]:
    """Answer a question; return what was said as plain data."""
    from fused_kv_llm.demo import MiniLM, PassageIndex, Rag, explain

    quiet_libraries()
    index = PassageIndex.open(options["kv_dir"], MiniLM())
    options = {**index.info.options, **options}
    if model not in (None, options["model"]):
        options |= {"model": model, "tokenizer": None, "dtype": None}
    with _load(**options) as engine:
        prompt = Rag(index, engine, k=k, max_tokens=max_tokens).prompt(question)
        answer, report = _answer(engine, prompt, max_tokens=max_tokens)
        chunks = [asdict(passage) for passage in prompt.sources]
        said = {"question": question, "answer": answer, "sources": chunks, "report": report.to_dict()}
        if html is not None:
            html.write_text(report.to_html(question=question, answer=answer, chunks=chunks), encoding="ascii")
            out.print(f"The report is in {escape(str(html))}", highlight=False, soft_wrap=True)
        if compare:
            rows = _compare(engine, prompt, engine.recompute_ratio, max_tokens=max_tokens)
            out.print(explain(rows), highlight=False)
            said["ways"] = [asdict(row) for row in rows]
    return said


@app.command()
def demo(
    *,
    kv_dir: Annotated[Path | None, typer.Option(help="Defaults to the user's cache folder.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Passages per prompt.")] = DEMO.passages,
    questions: Annotated[int, typer.Option(min=1, max=36, help="How many questions to ask.")] = 3,
    ratio: Ratio = DEMO.ratio,
    max_tokens: MaxTokens = DEMO.max_tokens,
    web: Annotated[bool, typer.Option("--web", help="Ask in a browser instead; --questions are prepared.")] = False,
    port: Annotated[int, typer.Option(help="Of the web UI; 0 takes one that is free.")] = 8000,
) -> None:
    """Ingest the handbook of a fictional ferry company and compare ways of asking about it.

    Needs no network. Most of the first run is the ingestion; later runs find the handbook stored.
    """
    if web:
        serve_demo(kv_dir, questions, ratio, port)
        return
    from fused_kv_llm.demo import (
        MiniLM,
        PassageIndex,
        Rag,
        explain,
        handbook_folder,
        handbook_questions,
        medians,
        times,
    )
    from fused_kv_llm.paths import cache_folder

    folder = kv_dir or cache_folder() / "demo-kv"
    with _ingest([handbook_folder()], 1000, model=DEFAULT_MODEL, kv_dir=folder) as engine:
        rag = Rag(PassageIndex.open(folder, MiniLM()), engine, k=k, max_tokens=max_tokens)
        limits: dict[str, Any] = {"max_tokens": max_tokens, "stop": DEMO.stop}
        compared = []
        for entry in handbook_questions()[:questions]:
            out.print()
            out.rule()
            out.print(f"[bold]{escape(entry['question'])}[/]", highlight=False, soft_wrap=True)
            prompt = rag.prompt(entry["question"])
            _answer(engine, prompt, recompute_ratio=ratio, **limits)
            compared.append(_compare(engine, prompt, ratio, **limits))
            out.print(f"[dim]In the handbook: {escape(entry['answer'])}[/]", highlight=False)
    middle = medians(compared)
    out.print()
    out.print(times(middle, f"Medians over the questions asked ({len(compared)})"))
    out.print(explain(middle), highlight=False)
    out.print(
        f"Prompts of {middle[0].prompt_tokens:,} tokens at ratio {ratio}: longer prompts and lower ratios gain more. "
        f"The engine's default ratio is {engine.recompute_ratio}.",
        highlight=False,
    )


def _ingest(paths: Sequence[Path], chunk_chars: int, *, refresh: bool = False, **options: Any) -> FusedKVEngine:
    # At once, since importing the libraries takes seconds.
    out.print(f"Reading {escape(', '.join(map(str, paths)))}", highlight=False, soft_wrap=True)
    from fused_kv_llm.demo import MiniLM, PassageIndex, read_passages

    quiet_libraries()
    passages = read_passages(paths, chunk_chars=chunk_chars)
    out.print(f"{len(passages)} passages, files read: {len({passage.source for passage in passages})}")
    embedder = MiniLM()
    engine = _load(embedder=embedder, **options)
    try:
        report = engine.build_kv_cache([passage.text for passage in passages], preprocess="later")
        out.print(report.summary(), highlight=False, soft_wrap=True)
        with doing("Embedding the passages"):
            made = {name: value for name, value in engine.config if name in IDENTITY_OPTIONS}
            made |= {"dtype": engine.dtype, "kv_dtype": engine.kv_dtype}
            index = PassageIndex.update(engine.store.kv_dir, passages, embedder=embedder, **made)
        asking = f"fused-kv ask QUESTION --kv-dir {engine.config.kv_dir}"
        out.print(f"{len(index.passages)} passages can be asked about: {asking}", soft_wrap=True)
        _preprocess(engine, report.chunks_pending, refresh=refresh)
    except BaseException:
        engine.close()
        raise
    return engine


def _preprocess(engine: FusedKVEngine, pending: int, *, refresh: bool) -> None:
    """Do the second pass, after saying that nobody has to wait for it."""
    if pending:
        out.print(
            f"{pending} passages are preprocessed now, for better answers. They can be asked about meanwhile, from "
            "another terminal. Ctrl-C stops it; the same command goes on from there.",
            highlight=False,
            soft_wrap=True,
        )
    report = engine.preprocess(refresh=refresh)
    if report.chunks_preprocessed or report.chunks_refreshed or report.chunks_stale:
        out.print(report.summary(), highlight=False, soft_wrap=True)


def _load(*, model: str, **options: Any) -> FusedKVEngine:
    from fused_kv_llm.engine import FusedKVEngine

    with doing(f"Loading {model}"):
        engine = FusedKVEngine(model, **options)
    out.print(f"[dim]{escape(model)}: {escape(engine.choice)}[/]", highlight=False)
    return engine


def _answer(engine: FusedKVEngine, prompt: RagPrompt, **options: Any) -> tuple[str, FusionReport]:
    """Print the sources, the answer as it is generated, and what the request did; return the last two."""
    from fused_kv_llm.demo import describe, sources
    from fused_kv_llm.report import FusionReport

    out.print(sources(prompt.sources), highlight=False)
    if len(prompt.sources) < prompt.passages_wanted:
        out.print(f"[dim]The model's context holds {len(prompt.sources)} passages of {prompt.passages_wanted}[/]")
    out.print()
    texts, report = [], FusionReport()
    for piece in engine.stream(prompt.text, **options):
        out.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
        texts.append(piece.text)
        report = piece.report or report
    out.print(f"\n[dim]{escape(describe(report))}[/]\n", highlight=False, soft_wrap=True)
    return "".join(texts), report


def _compare(engine: FusedKVEngine, prompt: RagPrompt, ratio: RecomputeRatio, **limits: Any) -> list[Row]:
    """Print the times and the answers of every way."""
    from fused_kv_llm.demo import answers, compare, times

    ratios: dict[RecomputeRatio, None] = dict.fromkeys((1.0, ratio, 0.0))
    with doing("Answering again in other ways"):
        rows = compare(engine, prompt.text, ratios=list(ratios), **limits)
    out.print(times(rows, f"First token of a prompt of {rows[0].prompt_tokens:,} tokens"))
    out.print(answers(rows), highlight=False)
    return rows
