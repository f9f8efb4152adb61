"""``fused-kv calibrate layers`` and ``anchors``: where attention finds answers, and what has to stand for chunks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from fused_kv_llm.cli.options import takes_engine_options
from fused_kv_llm.cli.terminal import out, quiet_libraries

__all__ = ["add_layers_command"]


def add_layers_command(app: typer.Typer) -> None:
    """Add the commands to ``fused-kv calibrate``."""
    app.command("layers")(_layers)
    app.command("anchors")(_anchors)


@takes_engine_options("model", "tokenizer", "dtype", "device")
def _layers(
    *,
    data: Annotated[
        Path,
        typer.Option(help="JSON lines: question, answers[], passages[{id, text}], gold_passage_ids[]."),
    ],
    questions: Annotated[int, typer.Option(min=1, help="Questions to use.")] = 60,
    skip: Annotated[int, typer.Option(min=0, help="Lines of the file to pass over first.")] = 0,
    passages: Annotated[int, typer.Option(min=1, help="Passages in a prompt.")] = 5,
    top: Annotated[int, typer.Option(min=1, help="How many layers are critical.")] = 3,
    **options: Any,
) -> None:
    """Find a model's critical layers on questions whose answers stand in their passages; `qcfuse` uses them."""
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.selectors import save_profile
    from fused_kv_llm.tuning import profile_layers, read_span_samples

    samples = read_span_samples(data, questions, skip=skip, num_passages=passages)
    quiet_libraries()
    with (
        tempfile.TemporaryDirectory(prefix="fused-kv-layers-") as folder,
        FusedKVEngine(**options, kv_dir=folder, store_misses=False) as engine,
    ):
        profile = profile_layers(engine, track(samples, description="Questions", console=out), top=top)
        fingerprint, used = engine.model_fingerprint, engine.dtype
    path = save_profile(
        fingerprint,
        {
            "model": options["model"],
            "dtype": used,
            "layers": list(profile.layers),
            "recall": list(profile.recall),
            "recall_of_top": list(profile.recall_of_top),
            "data": data.name,
            "samples": profile.samples,
            "skip": skip,
            "passages": passages,
        },
    )
    table = Table(title=f"Recall@10% of answer tokens, {profile.samples} questions", title_justify="left")
    for column in ("best layers", "together", "layer", "alone"):
        table.add_column(column, justify="right")
    best = sorted(range(len(profile.recall)), key=lambda layer: -profile.recall[layer])
    for count, (together, layer) in enumerate(zip(profile.recall_of_top, best, strict=False), 1):
        table.add_row(str(count), f"{together:.1%}", str(layer), f"{profile.recall[layer]:.1%}")
    out.print(table)
    out.print(f"Critical layers {', '.join(map(str, profile.layers))}: kept in {path}", soft_wrap=True)


@takes_engine_options("model", "tokenizer", "dtype", "device")
def _anchors(
    *,
    data: Annotated[
        Path,
        typer.Option(help="JSON lines: question, answers[], passages[{id, text}], gold_passage_ids[]."),
    ],
    questions: Annotated[int, typer.Option(min=1, help="Questions to use.")] = 20,
    skip: Annotated[int, typer.Option(min=0, help="Lines of the file to pass over first.")] = 0,
    passages: Annotated[int, typer.Option(min=1, help="Passages in a prompt.")] = 5,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Shares of a chunk's tokens to try; may be repeated.")
    ] = None,
    **options: Any,
) -> None:
    """Find which rule ranks a model's anchors best, and how many it needs; `qcfuse` uses them."""
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.selectors import save_anchors
    from fused_kv_llm.tuning import profile_anchors, read_span_samples

    samples = read_span_samples(data, questions, skip=skip, num_passages=passages)
    quiet_libraries()
    with (
        tempfile.TemporaryDirectory(prefix="fused-kv-anchors-") as folder,
        FusedKVEngine(**options, kv_dir=folder, store_misses=False) as engine,
    ):
        asked = track(samples, description="Questions", console=out)
        profile = profile_anchors(engine, asked, ratios=ratio) if ratio else profile_anchors(engine, asked)
        fingerprint, used = engine.model_fingerprint, engine.dtype
    recall: dict[str, dict[str, float]] = {}
    for anchors, found in profile.recall.items():
        recall.setdefault(anchors.rule, {})[f"{anchors.ratio:g}"] = found
    path = save_anchors(
        fingerprint,
        {
            "model": options["model"],
            "dtype": used,
            "rule": profile.chosen.rule,
            "ratio": profile.chosen.ratio,
            "recall": recall,
            "recall_of_full_context": profile.reference,
            "data": data.name,
            "samples": profile.samples,
            "skip": skip,
            "passages": passages,
        },
    )
    title = f"Recall@10% of answer tokens, {profile.samples} questions; the whole context: {profile.reference:.1%}"
    out.print(_recall_table(title, recall))
    out.print(f"Anchors {profile.chosen.rule} at {profile.chosen.ratio:g}: kept in {path}", soft_wrap=True)


def _recall_table(title: str, recall: dict[str, dict[str, float]]) -> Table:
    """Return the recall by rule and ratio of anchors."""
    table = Table(title=title, title_justify="left")
    table.add_column("rule")
    for ratio in dict.fromkeys(ratio for of_rule in recall.values() for ratio in of_rule):
        table.add_column(ratio, justify="right")
    for rule, of_rule in recall.items():
        table.add_row(rule, *(f"{found:.1%}" for found in of_rule.values()))
    return table
