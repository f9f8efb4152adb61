"""``fused-kv calibrate``: the smallest ratio that keeps the answers of full prefill on a store's own corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from fused_kv_llm.cli.calibration_picture import calibration_table, draw_calibration
from fused_kv_llm.cli.options import takes_engine_options
from fused_kv_llm.cli.terminal import FriendlyGroup, err, out, quiet_libraries
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.errors import CorpusError

if TYPE_CHECKING:
    from fused_kv_llm.engine import Calibration
    from fused_kv_llm.tuning import CalibrationResult, MadeQuestions

__all__ = ["calibrate_app"]

calibrate_app = typer.Typer(
    cls=FriendlyGroup,
    invoke_without_command=True,
    help="Find how much has to be recomputed on this corpus; recompute_ratio='auto' uses it.",
)


Confidence = Annotated[
    float, typer.Option(help="How sure it has to be that questions like these meet the target on average.")
]


@calibrate_app.callback()
@takes_engine_options(leave_out={"recompute_ratio", "selector", "store_misses"})
def calibrate_ratio(
    context: typer.Context,
    *,
    questions: Annotated[
        Path | None, typer.Option(help="One question a line, or JSON lines with a field 'question'.")
    ] = None,
    target_agreement: Annotated[float, typer.Option(help="Share of full prefill's tokens to be met.")] = 0.9,
    confidence: Confidence = 0.95,
    selector: Annotated[list[str] | None, typer.Option(help="Selectors to try; may be repeated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Questions to make from the chunks if none are given.")] = 100,
    quoted: Annotated[
        bool, typer.Option("--quoted", help="Make questions by quoting sentences; the model writes none.")
    ] = False,
    k: Annotated[int, typer.Option(min=1, help="Chunks in a prompt.")] = 5,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the curve; beside the store by default.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say what was found before, and whether it still holds: exit code 1.")
    ] = False,
    **options: Any,
) -> None:
    """Compare fused answers with full prefill's on the store's own corpus and keep the ratio that meets the target.

    The calibration is that of the model, the tenant and the preprocessing that are given; others are not touched.
    """
    if context.invoked_subcommand is not None:
        return
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.tuning import calibrate, check_calibration

    _check_store(options["kv_dir"])
    quiet_libraries()
    if check:
        with FusedKVEngine(**options, store_misses=False) as engine:
            _show_check(engine.calibration(), engine.calibration_changes())
        return
    asked = _read_questions(questions) if questions is not None else None
    selectors = selector or [DEFAULT_SELECTOR]
    # Before the model is loaded, which takes long.
    check_calibration(asked, target_agreement, selectors, confidence=confidence)
    with FusedKVEngine(**options, store_misses=False) as engine:
        if asked is None and not quoted:
            err.print("The model writes questions about the chunks first; that takes a few minutes on a CPU.")
        result = calibrate(
            engine,
            asked,
            target_agreement=target_agreement,
            confidence=confidence,
            selectors=selectors,
            num_questions=count,
            num_chunks=k,
            written=not quoted,
            track=lambda items: track(items, description="Questions", console=out),
        )
        # One for each, so that tenants and models do not overwrite each other's.
        path = picture or engine.store.kv_dir / f"calibration-{engine.fusion_identity[:16]}.png"
    out.print(calibration_table(result))
    draw_calibration(result, path)
    _conclude(result, path)


def _conclude(result: CalibrationResult, path: Path) -> None:
    chosen = result.chosen
    shown = (
        "full prefill: no smaller ratio is shown to be good enough"
        if chosen.recompute_ratio >= 1.0
        else f"{chosen.recompute_ratio:g} with {chosen.selector} (agreement {chosen.agreement:.1%}, "
        f"at least {chosen.agreement_bound:.1%})"
    )
    lines = [
        f"Asked {chosen.questions} questions, {chosen.asked}.",
        f"recompute_ratio='auto' now means {shown}; asked for {chosen.target_agreement:.1%} with a confidence of "
        f"{chosen.confidence:.0%}.",
        result.advice,
        f"Curve: {path}",
    ]
    for line in filter(None, lines):
        out.print(line, highlight=False, soft_wrap=True)
    if result.made is not None:
        for note in _notes(result.made):
            err.print(f"[yellow]Note:[/] {note}", highlight=False, soft_wrap=True)


def _notes(made: MadeQuestions) -> Iterator[str]:
    if made.chunks_tried and made.written < len(made.asked):
        faults = ", ".join(f"{count} {fault}" for fault, count in sorted(made.faults.items()))
        yield (
            f"the model wrote {made.written} questions that can be used, for {made.chunks_tried} chunks "
            f"({faults or 'too few chunks'}); the others quote sentences."
        )
    yield (
        "questions that are made may be easier to agree on than people's: give some of your users' own (--questions), "
        "or a target that is some points higher."
    )


def _show_check(found: Calibration, changes: list[str]) -> None:
    bound = "" if found.agreement_bound is None else f", at least {found.agreement_bound:.1%}"
    table = Table(title="Calibration", title_justify="left", show_header=False)
    table.add_row("recompute_ratio='auto'", f"{found.recompute_ratio:g} with {found.selector}")
    table.add_row("agreement", f"{found.agreement:.1%}{bound} (asked for {found.target_agreement:.1%})")
    table.add_row("questions", " ".join(filter(None, [f"{found.questions},", found.asked])).rstrip(","))
    if found.made_on is not None:
        table.add_row("made", f"{found.made_on.made_at}, version {found.made_on.library}")
        table.add_row("on", f"{found.made_on.chunks:,} chunks, {found.made_on.preprocessed:.0%} of them preprocessed")
    out.print(table)
    if not changes:
        out.print("It still holds: nothing it depends on has changed much.", highlight=False, soft_wrap=True)
        return
    for change in changes:
        out.print(f"It may not hold any more: {change}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _check_store(kv_dir: Path) -> None:
    if not (kv_dir / "index.sqlite").is_file():
        raise CorpusError(f"There is no KV store in {str(kv_dir)!r}: ingest the corpus first")


@calibrate_app.command("alpha")
@takes_engine_options(leave_out={"recompute_ratio", "selector", "store_misses"})
def calibrate_alpha(
    *,
    questions: Annotated[
        Path | None, typer.Option(help="One question a line, or JSON lines with a field 'question'.")
    ] = None,
    target_agreement: Annotated[float, typer.Option(help="Share of full prefill's tokens to be met.")] = 0.9,
    confidence: Confidence = 0.95,
    count: Annotated[int, typer.Option(min=1, help="Questions to make from the chunks if none are given.")] = 100,
    k: Annotated[int, typer.Option(min=1, help="Chunks in a prompt.")] = 5,
    variants: Annotated[int, typer.Option(min=1, help="Variants of a chunk, as they were kept.")] = 3,
    **options: Any,
) -> None:
    """Find the smallest scale of Cache-Craft's overhead that meets the target; recompute_ratio='auto' uses it."""
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.tuning import profile_alpha

    _check_store(options["kv_dir"])
    quiet_libraries()
    asked = _read_questions(questions) if questions is not None else None
    with FusedKVEngine(**options, variants=variants, store_misses=False) as engine:
        profile = profile_alpha(
            engine,
            asked,
            target_agreement=target_agreement,
            confidence=confidence,
            num_questions=count,
            num_chunks=k,
            track=lambda items: track(items, description="Questions", console=out),
        )
    table = Table(title="Agreement with full prefill", title_justify="left")
    for column in ("alpha", "mean CFO", "agreement"):
        table.add_column(column, justify="right")
    for point in profile.points:
        chosen = "bold" if point.alpha == profile.chosen.alpha else None
        table.add_row(f"{point.alpha:g}", f"{point.mean_overhead:.1%}", f"{point.agreement:.1%}", style=chosen)
    out.print(table)
    found = profile.chosen.alpha
    means = (
        "full prefill: no alpha is shown to meet the target" if found is None else f"cache_craft with alpha {found:g}"
    )
    out.print(f"recompute_ratio='auto' now means {means}", highlight=False, soft_wrap=True)


def _read_questions(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [json.loads(line)["question"] if line.lstrip().startswith("{") else line.strip() for line in lines]
    except OSError as error:
        raise CorpusError(f"The questions in {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise CorpusError(f"A line of {str(path)!r} is neither a question nor JSON with a field 'question'") from error
    if not found:
        raise CorpusError(f"There is no question in {str(path)!r}")
    return found
