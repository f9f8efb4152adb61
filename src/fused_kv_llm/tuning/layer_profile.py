"""Critical layers: which layers' attention finds the answer (QCFuse section 3.4).

A question is probed with anchors over its passages, the answer's places in which are known. Every layer by itself
selects a tenth of the context (equation 12); the layers that find most of the answer's tokens (13) are the critical
ones (19).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import CorpusError
from fused_kv_llm.selectors import Anchors, QueryAttention, View, anchors_of

__all__ = [
    "LayerProfile",
    "SpanSample",
    "answer_token_positions",
    "gold_positions",
    "profile_layers",
    "read_span_samples",
    "recall_by_layer",
]

_PROMPT = "Context:\n{}\n\nQuestion: {}\nAnswer:"


@dataclass(frozen=True, slots=True)
class SpanSample:
    """A question whose answers stand in its passages word by word.

    Parameters
    ----------
    question : str
    answers, passages : tuple of str
    """

    question: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The prompt it is probed with."""
        return _PROMPT.format("\n\n".join(self.passages), self.question)


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What a profile found.

    Parameters
    ----------
    layers : tuple of int
        The critical layers, best first.
    recall : tuple of float
        Recall@10% of every layer by itself (eq. 18), by layer; 0 for layers with a window, which see little of a
        context and are not scored.
    recall_of_top : tuple of float
        Recall@10% of the best ``k`` layers together (eq. 20), for k = 1, 2, ...
    samples : int
        Questions it rests on.
    """

    layers: tuple[int, ...]
    recall: tuple[float, ...]
    recall_of_top: tuple[float, ...]
    samples: int


def read_span_samples(path: Path, count: int, *, skip: int = 0, num_passages: int = 5) -> list[SpanSample]:
    """Read questions whose gold passages contain an answer.

    Parameters
    ----------
    path : Path
        One JSON object a line: ``question, answers[], passages[{id, text}], gold_passage_ids[]``.
    count : int
        Questions to return at most.
    skip : int
        Lines to pass over first.
    num_passages : int
        Passages in the prompt, the gold ones among them, in the order of the file.

    Raises
    ------
    CorpusError
        If a line is no such object, or no question is left.
    """
    samples: list[SpanSample] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[skip:], skip + 1):
        if len(samples) == count:
            break
        try:
            record = json.loads(line)
            gold = set(record["gold_passage_ids"])
            # Stable: gold passages first to be kept, then back to the file's order.
            kept = sorted(range(len(record["passages"])), key=lambda i: record["passages"][i]["id"] not in gold)
            passages = tuple(record["passages"][i]["text"] for i in sorted(kept[:num_passages]))
            sample = SpanSample(record["question"], tuple(record["answers"]), passages)
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"Line {number} of {str(path)!r} is no question with answers, passages and gold_passage_ids: {error!r}"
            ) from error
        if any(_spans(text, sample.answers) for text in passages):
            samples.append(sample)
    if not samples:
        raise CorpusError(f"No question in {str(path)!r} has an answer that stands in its passages word by word.")
    return samples


def _spans(text: str, answers: Sequence[str]) -> list[tuple[int, int]]:
    found = (re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text) for answer in answers if answer)
    return [match.span() for matches in found for match in matches]


def answer_token_positions(
    text: str, offsets: NDArray[np.int64], answers: Sequence[str], begin: int, end: int
) -> list[int]:
    """Return the positions of every token that shows a part of an answer in ``text[begin:end]``.

    All spans of a sample form one gold set (section 3.2.3).
    """
    wanted = np.zeros(len(offsets), dtype=bool)
    for first, last in _spans(text[begin:end], answers):
        wanted |= (offsets[:, 0] < begin + last) & (offsets[:, 1] > begin + first)
    return [int(position) for position in np.flatnonzero(wanted)]


def gold_positions(engine: FusedKVEngine, sample: SpanSample) -> list[int]:
    """Return the positions of every token of a sample's prompt that shows a part of an answer in the passages."""
    rendered = engine.renderer.render(sample.prompt)
    begin = rendered.text.index(sample.prompt)
    end = begin + len("\n\n".join(sample.passages)) + _PROMPT.index("{}")
    offsets = engine.renderer.encode(rendered).offsets
    return answer_token_positions(rendered.text, offsets, sample.answers, begin, end)


def recall_by_layer(scores: Tensor, positions: Tensor, wanted: Sequence[int], ratio: float = 0.1) -> Tensor | None:
    """Return float64 ``[L]``: the share of wanted tokens among each layer's best ``floor(ratio * C)`` (eq. 13).

    Parameters
    ----------
    scores : Tensor
        float ``[L, C]``.
    positions : Tensor
        int64 ``[C]``.
    wanted : sequence of int
        Prompt positions; None is returned if none of them is among `positions`.
    ratio : float
    """
    is_wanted = torch.isin(positions, torch.tensor(list(wanted), dtype=torch.int64))
    if not bool(is_wanted.any()):
        return None
    best = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : int(ratio * positions.shape[0])]
    return is_wanted[best].sum(1).double() / is_wanted.sum()


def profile_layers(
    engine: FusedKVEngine, samples: Iterable[SpanSample], *, anchors: Anchors | None = None, top: int = 3
) -> LayerProfile:
    """Find the critical layers of an engine's model.

    Parameters
    ----------
    engine : FusedKVEngine
        Its store receives the passages and, for every layer, what the probe needs of them: use a folder that can be
        thrown away.
    samples : iterable of SpanSample
    anchors : Anchors or None
        None is what was profiled for the model, or else QCFuse's default.
    top : int
        How many layers are critical.

    Raises
    ------
    CorpusError
        If no answer stands in a passage whose KV could be reused.
    """
    anchors = anchors or anchors_of(engine.model_fingerprint) or Anchors()
    geometry = engine.loaded.geometry
    layers = geometry.global_layers or tuple(range(geometry.num_layers))
    everywhere = QueryAttention("profile", layers=layers, anchors=anchors)
    recalls, kept = [], []
    for sample in samples:
        engine.build_kv_cache(sample.passages, preprocess="later", progress=False)
        engine.build_anchors(sample.passages, selector=everywhere, progress=False)
        wanted = gold_positions(engine, sample)
        positions, scores = engine.requests.attention_by_layer(sample.prompt, View(layers, anchors=anchors))
        found = recall_by_layer(scores, positions, wanted)
        if found is not None:
            recalls.append(found)
            kept.append((scores, positions, wanted))
    if not recalls:
        raise CorpusError("No answer stands in a passage whose KV could be reused: there is nothing to profile by.")
    recall = torch.stack(recalls).mean(0)
    by_layer = dict(zip(layers, recall.tolist(), strict=True))
    ranked = torch.sort(recall, descending=True, stable=True).indices
    together = [_recall_of(ranked[:k], kept) for k in range(1, min(8, len(layers)) + 1)]
    return LayerProfile(
        tuple(layers[number] for number in ranked[:top].tolist()),
        tuple(by_layer.get(layer, 0.0) for layer in range(geometry.num_layers)),
        tuple(together),
        len(recalls),
    )


def _recall_of(layers: Tensor, kept: Sequence[tuple[Tensor, Tensor, list[int]]]) -> float:
    found = [recall_by_layer(scores[layers].sum(0, keepdim=True), positions, w) for scores, positions, w in kept]
    return float(torch.stack([value for value in found if value is not None]).mean())
