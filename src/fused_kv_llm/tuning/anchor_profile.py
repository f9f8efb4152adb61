"""Anchors: by which rule, and how many of a chunk's tokens, a question still finds the answer (QCFuse figure 6).

Questions are probed with anchors of every rule and ratio (equation 14), all layers scoring, and once seeing the whole
context; what counts is Recall@10% (12 and 13). The fewest anchors that find nearly as much of the answers as the whole
context does are the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import get_args

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError
from fused_kv_llm.selectors import AnchorRule, Anchors, QueryAttention, View

from .layer_profile import SpanSample, gold_positions, recall_by_layer

__all__ = ["RATIOS", "RULES", "AnchorProfile", "choose_anchors", "profile_anchors"]

RULES: tuple[AnchorRule, ...] = get_args(AnchorRule)
RATIOS = (0.05, 0.1, 0.2, 0.3)
_NEARLY = 0.95


@dataclass(frozen=True, slots=True)
class AnchorProfile:
    """What a profile found.

    Parameters
    ----------
    chosen : Anchors
    recall : dict of Anchors to float
        Recall@10% with each of them, rule by rule, ratios ascending.
    reference : float
        Recall@10% where the question sees the whole context.
    samples : int
        Questions it rests on.
    """

    chosen: Anchors
    recall: dict[Anchors, float]
    reference: float
    samples: int


def profile_anchors(
    engine: FusedKVEngine,
    samples: Iterable[SpanSample],
    *,
    rules: Sequence[AnchorRule] = RULES,
    ratios: Sequence[float] = RATIOS,
) -> AnchorProfile:
    """Find the anchors of an engine's model.

    Parameters
    ----------
    engine : FusedKVEngine
        Its store receives the passages and what the probes need of them, a question at a time: use a folder that can
        be thrown away.
    samples : iterable of SpanSample
    rules : sequence of str
    ratios : sequence of float

    Raises
    ------
    ConfigError
        If there is no such rule, a ratio is out of range, or there are none.
    CorpusError
        If no answer stands in a passage whose KV could be reused.
    """
    tried = [Anchors(rule, ratio) for rule in dict.fromkeys(rules) for ratio in sorted(set(ratios))]
    if not tried:
        raise ConfigError("There is no rule or no ratio of anchors to try: leave them out for all rules and ratios")
    geometry = engine.loaded.geometry
    layers = geometry.global_layers or tuple(range(geometry.num_layers))
    views: dict[Anchors | None, View] = {anchors: View(layers, anchors=anchors) for anchors in tried}
    views[None] = View(layers, full_context=True)
    found: dict[Anchors | None, list[float]] = {anchors: [] for anchors in views}
    for sample in samples:
        engine.build_kv_cache(sample.passages, preprocess="later", progress=False)
        wanted = gold_positions(engine, sample)
        for anchors, view in views.items():
            if anchors is not None:
                selector = QueryAttention("profile", layers=layers, anchors=anchors)
                engine.build_anchors(sample.passages, selector=selector, progress=False)
            positions, scores = engine.requests.attention_by_layer(sample.prompt, view)
            recall = recall_by_layer(scores.mean(0, keepdim=True), positions, wanted)
            if recall is not None:
                found[anchors].append(float(recall[0]))
        # All layers' keys once for each rule and ratio: more than a disk may have room for.
        engine.delete_chunks(sample.passages)
    if not found[None]:
        raise CorpusError("No answer stands in a passage whose KV could be reused: there is nothing to profile by.")
    recall_of = {anchors: fmean(found[anchors]) for anchors in tried}
    reference = fmean(found[None])
    return AnchorProfile(choose_anchors(recall_of, reference), recall_of, reference, len(found[None]))


def choose_anchors(recall: Mapping[Anchors, float], reference: float) -> Anchors:
    """Return the fewest anchors whose recall is at least 95 % of the reference's, the best rule of those.

    Parameters
    ----------
    recall : mapping of Anchors to float
        Where none comes that near, the one of the highest recall is taken.
    reference : float
        Recall where the question sees the whole context.
    """
    near = [anchors for anchors, value in recall.items() if value >= _NEARLY * reference]
    if not near:
        return max(recall, key=lambda anchors: recall[anchors])
    return min(near, key=lambda anchors: (anchors.ratio, -recall[anchors]))
