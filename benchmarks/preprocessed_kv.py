"""How far preprocessed KV is from that of full prefill, in the second layer and in all, and what that does to answers.

    python benchmarks/preprocessed_kv.py --data ../shared/data/musique_train100.jsonl

FusionRAG's figure 7b shows the deviation of the second layer's KV, and figure 17 how many similar chunks are best. Here
both are asked of all layers: chunks as they are, FusionRAG's preprocessing with one, three and ten similar chunks, the
default. The error of a chunk's keys (or values) is the sum of squared differences from those of full prefill, over that
of chunks without preprocessing, at the chunk's place in a prompt; a prompt's first chunk is left out, since it needs no
preprocessing. *exact context* is no method: the ten similar chunks before a chunk are prefilled as one prompt, so that
what is left of the error is that others stand before the chunk than in the prompt. Records are appended question by
question: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment
from evaluation.measure import run
from evaluation.metrics import mean_kl
from evaluation.questions import FRAMES, PARTS, Question
from evaluation.records import RecordFile
from evaluation.setting import Setting
from rich.progress import track
from torch import Tensor

from fused_kv_kernels import rerotate_keys
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_SELECTOR
from fused_kv_llm.model import PackedChunk, load_model, prefill_packed
from fused_kv_llm.offline import VECTORS_FILE, as_embedder
from fused_kv_llm.offline.neighbours import find_neighbours

WAYS: dict[str, dict[str, Any]] = {
    "none": {"preprocessing": "none"},
    **{f"fusionrag, {n}": {"preprocessing": "fusionrag", "num_neighbours": n} for n in (1, 3, 10)},
    "similar": {"preprocessing": "similar"},
}
EXACT = "exact context"
RULES = {"full reuse": (DEFAULT_SELECTOR, 0.0), "fusionrag": ("fusionrag", 0.15), "default": (DEFAULT_SELECTOR, 0.15)}
PARTS_OF_KV = ("keys", "values")
EARLY = 4
"""Chunks up to this one are early in a prompt."""

Sums = dict[str, float]


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="question files")
    parser.add_argument("--questions", type=int, default=12, help="first questions of every file")
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--others", type=int, default=20, help="questions whose passages are ingested with theirs")
    parser.add_argument("--frame", choices=FRAMES, default="plain")
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "preprocessed_kv_cpu.json")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class PromptKV:
    """The KV of a prompt's chunks, each as ``[L, Hkv, T, D]`` float32 keys and values."""

    chunks: list[tuple[Tensor, ...]]

    def errors(self, true: PromptKV) -> Sums:
        """Return sums of squared differences by what they are of: keys or values, layers, place."""
        sums: Sums = {}
        for number, (mine, theirs) in enumerate(zip(self.chunks, true.chunks, strict=True), 1):
            if number == 1:
                continue
            place = "early" if number <= EARLY else "late"
            for part, own, full in zip(PARTS_OF_KV, mine, theirs, strict=True):
                by_layer = (own - full).square().flatten(1).sum(1)
                for layers, value in (("second", by_layer[1]), ("all", by_layer.sum())):
                    name = f"{part}, {layers}, {place}"
                    sums[name] = sums.get(name, 0.0) + float(value)
        return sums


def spans(engine: FusedKVEngine, question: Question, frame: str) -> Iterator[slice]:
    """Yield where each passage's tokens stand in the rendered prompt."""
    rendered = engine.renderer.render(question.prompt(frame))
    begins, ends = engine.renderer.encode(rendered).offsets.T
    at = 0
    for passage in question.passages:
        at = rendered.text.index(passage, at)
        rows = ((begins >= at) & (ends <= at + len(passage)) & (ends > begins)).nonzero()[0]
        yield slice(int(rows[0]), int(rows[-1]) + 1)
        at += len(passage)


def kv_of(engine: FusedKVEngine, question: Question, frame: str, ratio: float) -> PromptKV:
    """Return the KV with which a prompt would be answered."""
    fused, _ = engine.prefill(question.prompt(frame), recompute_ratio=ratio, max_tokens=1)
    try:
        parts = fused.cache.keys[:, 0], fused.cache.values[:, 0]
        return PromptKV([tuple(part[:, :, span].float() for part in parts) for span in spans(engine, question, frame)])
    finally:
        fused.cache.release()


class ExactContexts:
    """The KV of chunks behind their ten similar chunks, all prefilled as one prompt.

    Parameters
    ----------
    engine : FusedKVEngine
    corpus : list of str
        Distinct; where similar chunks come from.
    """

    def __init__(self, engine: FusedKVEngine, corpus: list[str]) -> None:
        self._engine, self._corpus = engine, corpus

    def kv_of(self, question: Question, frame: str) -> PromptKV:
        """Return the KV of a prompt's chunks, moved to their places in it."""
        engine, chunks = self._engine, list[tuple[Tensor, ...]]()
        vectors = engine.store.kv_dir / VECTORS_FILE
        similar = find_neighbours(question.passages, self._corpus, 10, as_embedder(None), vectors)
        ids = engine.encode(question.prompt(frame))
        for passage, span in zip(question.passages, spans(engine, question, frame), strict=True):
            keys, values, at = self._behind(tuple(ids[span]), similar[passage])
            tables = engine.loaded.geometry.tables(torch.full((span.stop - span.start,), span.start - at))
            moved = [rerotate_keys(layer, table) for layer, table in zip(keys, tables, strict=True)]
            chunks.append((torch.stack(moved).float(), values.float()))
        return PromptKV(chunks)

    def _behind(self, token_ids: tuple[int, ...], similar: tuple[str, ...]) -> tuple[Tensor, Tensor, int]:
        """Return keys and values of the last tokens, and for which position the keys of the first are rotated."""
        before = [token for text in similar for token in self._engine.token_ids(text)]
        whole = PackedChunk((*before, *token_ids))
        kv = prefill_packed(self._engine.loaded, [whole], self._engine._parts.prefix)[0]
        return kv.keys[:, :, len(before) :], kv.values[:, :, len(before) :], kv.position + len(before)


def ask(
    engines: dict[str, FusedKVEngine], exact: ExactContexts, question: Question, setting: Setting
) -> dict[str, dict[str, Any]]:
    """Return the record of every preprocessing: errors of the KV, and KL divergences by rule."""
    frame = setting.frame
    full = run(engines["none"], question, setting, recompute_ratio=1.0)
    true = kv_of(engines["none"], question, frame, 1.0)
    records: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        kl = {}
        for rule, (selector, ratio) in RULES.items():
            got = run(engine, question, setting, selector=selector, recompute_ratio=ratio)
            kl[rule] = mean_kl(full.log_probs, got.log_probs)
        records[name] = {"errors": kv_of(engine, question, frame, 0.0).errors(true), "kl": kl}
    records[EXACT] = {"errors": exact.kv_of(question, frame).errors(true), "kl": {}}
    return records


def summarise(records: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for every preprocessing: errors over those without, and shares of full reuse's KL won back."""

    def total(name: str, kind: str, of: str) -> float:
        return sum(float(record[name][kind][of]) for record in records)

    rows = []
    for name in (*WAYS, EXACT):
        row: dict[str, Any] = {"preprocessing": name, "questions": len(records)}
        for of in records[0][name]["errors"]:
            row[of] = total(name, "errors", of) / total("none", "errors", of)
        for rule in records[0][name]["kl"]:
            row[rule] = 1 - total(name, "kl", rule) / total("none", "kl", "full reuse")
        rows.append(row)
    return rows


def markdown(data: str, rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    errors = [f"{part}, {layers}, {place}" for layers in ("second", "all") for part in PARTS_OF_KV
              for place in ("early", "late")]  # fmt: skip
    columns = [*errors, *RULES]
    lines = [f"## {data}, {rows[0]['questions']} questions", "",
             f"| preprocessing | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]  # fmt: skip
    for row in rows:
        cells = [f"{row[name]:.2f}" for name in errors] + [f"{row[rule]:.0%}" if rule in row else "" for rule in RULES]
        lines.append(f"| {row['preprocessing']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark."""
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-preprocessed-"))
    setting = Setting(frame=args.frame, passages=args.passages, part=args.part)
    tables, results, loaded = [], {}, load_model("smollm2-135m", dtype=args.dtype)
    for path in args.data:
        # Chunks of another set are no similar chunks of this one's.
        with ExitStack() as stack:
            engines = {name: stack.enter_context(
                           FusedKVEngine(loaded, kv_dir=kv_dir / path.stem, store_misses=False, **options))
                       for name, options in WAYS.items()}  # fmt: skip
            asked = setting.questions(path, max(args.questions, args.others), engines["none"])
            corpus = list(dict.fromkeys(text for question in asked for text in question.passages))
            for name, engine in engines.items():
                report = engine.build_kv_cache(corpus, preprocess="wait", refresh=True)
                print(f"{path.stem}, {name}: {report.summary()}")
            exact = ExactContexts(engines["none"], corpus)
            digest = f"{setting.digest(path.stem, engines['none'])} {len(corpus)} chunks"
            out = RecordFile(args.out, digest, (0, 1))
            questions = asked[: args.questions]
            for question in track(questions, description=path.stem):
                if (question.id, EXACT) not in out.read():
                    out.append(question.id, ask(engines, exact, question, setting))
            known = out.read()
            results[path.stem] = summarise([{name: known[q.id, name] for name in (*WAYS, EXACT)} for q in questions])
            tables.append(markdown(path.stem, results[path.stem]))
    result = {"environment": environment(), "frame": args.frame, "passages": args.passages, "part": args.part,
              "dtype": str(loaded.dtype).removeprefix("torch."), "sets": results}  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text("# Preprocessed KV\n\n" + "\n".join(tables), encoding="utf-8")
    print("\n".join(tables))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Stopped. The records so far are kept: the same command goes on from here.")
