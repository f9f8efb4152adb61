"""``fused-kv calibrate``: the smallest ratio that keeps the answers of full prefill on a store's own corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from fused_kv_llm.cli.options import takes_engine_options
from fused_kv_llm.cli.terminal import FriendlyGroup, out, quiet_libraries
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.errors import CorpusError, MissingExtraError

if TYPE_CHECKING:
    from fused_kv_llm.tuning import CalibrationResult

__all__ = ["calibrate_app"]

calibrate_app = typer.Typer(
    cls=FriendlyGroup,
    invoke_without_command=True,
    help="Find how much has to be recomputed on this corpus; recompute_ratio='auto' uses it.",
)


@calibrate_app.callback()
@takes_engine_options(leave_out={"recompute_ratio", "selector", "store_misses"})
def calibrate_ratio(
    context: typer.Context,
    *,
    questions: Annotated[
        Path | None, typer.Option(help="One question a line, or JSON lines with a field 'question'.")
    ] = None,
    target_agreement: Annotated[float, typer.Option(help="Share of full prefill's tokens to be met.")] = 0.95,
    selector: Annotated[list[str] | None, typer.Option(help="Selectors to try; may be repeated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Questions to make from the chunks if none are given.")] = 20,
    k: Annotated[int, typer.Option(min=1, help="Chunks in a prompt.")] = 5,
    picture: Annotated[Path | None, typer.Option(help="Where to draw the curve; beside the store by default.")] = None,
    **options: Any,
) -> None:
    """Compare fused answers with full prefill's on the store's own corpus and keep the ratio that meets the target."""
    if context.invoked_subcommand is not None:
        return
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.tuning import calibrate, check_calibration

    kv_dir: Path = options["kv_dir"]
    if not (kv_dir / "index.sqlite").is_file():
        raise CorpusError(f"There is no KV store in {str(kv_dir)!r}: ingest the corpus first")
    quiet_libraries()
    asked = _read_questions(questions) if questions is not None else None
    selectors = selector or [DEFAULT_SELECTOR]
    # Before the model is loaded, which takes long.
    check_calibration(asked, target_agreement, selectors)
    with FusedKVEngine(**options, store_misses=False) as engine:
        result = calibrate(
            engine,
            asked,
            target_agreement=target_agreement,
            selectors=selectors,
            num_questions=count,
            num_chunks=k,
            track=lambda items: track(items, description="Questions", console=out),
        )
        path = picture or engine.store.kv_dir / "calibration.png"
    out.print(_table(result))
    _draw(result, path)
    chosen = result.chosen
    out.print(
        f"recompute_ratio='auto' now means {chosen.recompute_ratio:g} with {chosen.selector} "
        f"(agreement {chosen.agreement:.1%}, asked for {target_agreement:.1%}). Curve: {path}",
        highlight=False,
        soft_wrap=True,
    )


@calibrate_app.command("alpha")
@takes_engine_options(leave_out={"recompute_ratio", "selector", "store_misses"})
def calibrate_alpha(
    *,
    questions: Annotated[
        Path | None, typer.Option(help="One question a line, or JSON lines with a field 'question'.")
    ] = None,
    target_agreement: Annotated[float, typer.Option(help="Share of full prefill's tokens to be met.")] = 0.95,
    count: Annotated[int, typer.Option(min=1, help="Questions to make from the chunks if none are given.")] = 20,
    k: Annotated[int, typer.Option(min=1, help="Chunks in a prompt.")] = 5,
    variants: Annotated[int, typer.Option(min=1, help="Variants of a chunk, as they were kept.")] = 3,
    **options: Any,
) -> None:
    """Find the smallest scale of Cache-Craft's overhead that meets the target; recompute_ratio='auto' uses it."""
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.tuning import profile_alpha

    kv_dir: Path = options["kv_dir"]
    if not (kv_dir / "index.sqlite").is_file():
        raise CorpusError(f"There is no KV store in {str(kv_dir)!r}: ingest the corpus first")
    quiet_libraries()
    asked = _read_questions(questions) if questions is not None else None
    with FusedKVEngine(**options, variants=variants, store_misses=False) as engine:
        profile = profile_alpha(
            engine,
            asked,
            target_agreement=target_agreement,
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
    means = "full prefill: no alpha meets the target" if found is None else f"cache_craft with alpha {found:g}"
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


def _table(result: CalibrationResult) -> Table:
    table = Table(title="Agreement with full prefill", title_justify="left")
    for column in ("selector", "ratio", "agreement", "first token", "x sooner"):
        table.add_column(column, justify="left" if column == "selector" else "right")
    for point in result.points:
        chosen = (point.selector, point.ratio) == (result.chosen.selector, result.chosen.recompute_ratio)
        table.add_row(
            point.selector,
            f"{point.ratio:g}",
            f"{point.agreement:.1%}",
            f"{point.median_ttft_s:.2f} s",
            f"{result.full_ttft_s / point.median_ttft_s:.1f}",
            style="bold" if chosen else None,
        )
    return table


def _draw(result: CalibrationResult, path: Path) -> None:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtraError("matplotlib", "demo") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    drawn: Any = axes
    for name in dict.fromkeys(point.selector for point in result.points):
        points = [point for point in result.points if point.selector == name]
        drawn.plot([p.median_ttft_s for p in points], [p.agreement for p in points], marker="o", label=name)
        for point in points:
            drawn.annotate(f"{point.ratio:g}", (point.median_ttft_s, point.agreement), fontsize=8, xytext=(4, -10),
                           textcoords="offset points")  # fmt: skip
    drawn.axhline(result.chosen.target_agreement, color="grey", linestyle="--", linewidth=1, label="target")
    drawn.scatter([result.full_ttft_s], [1.0], marker="*", s=120, color="black", label="full prefill")
    drawn.set_xlabel("time to first token (s)")
    drawn.set_ylabel("agreement with full prefill")
    drawn.set_title("Each point is a recomputation ratio", fontsize=10)
    drawn.grid(alpha=0.3)
    drawn.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
