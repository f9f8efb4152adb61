"""The trace has the scores by which tokens were chosen, where it is asked for, and they explain the choice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from numpy.typing import NDArray

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.online.divergence import expected_divergence
from fused_kv_llm.report import PromptTrace
from fused_kv_llm.selectors import SinkAttention

PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    folder: Path = tmp_path_factory.mktemp("traced")
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", preprocessing="none"
    ) as made:
        made.build_kv_cache(SHORT[:3], progress=False)
        yield made


def traced(engine: FusedKVEngine, selector: str, *, scores: bool = True) -> PromptTrace:
    report = engine.generate(
        PROMPT, max_tokens=1, selector=selector, recompute_ratio=0.2, trace_scores=scores, prefix_cache=False
    ).report
    assert report.trace is not None
    return report.trace


def ranked(trace: PromptTrace, attention: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the default's scores: attention, weighted by the place in the chunk; of a number's tokens the best."""
    default = SinkAttention()
    offset = np.concatenate([np.arange(np.sum(trace.kind == chunk)) for chunk in range(3)])
    scores: NDArray[np.float64] = attention * (1 + default.weight * np.exp(-offset / default.tokens))
    spans = trace.offsets[trace.kind >= 0]
    for number in re.finditer(r"\d+", trace.text):
        of_it = (spans[:, 0] < number.end()) & (spans[:, 1] > number.start())
        scores[of_it] = scores[of_it].max(initial=0)
    return scores


@pytest.mark.parametrize("selector", ["sink_attention", "qcfuse", "all_layers"])
def test_the_chosen_tokens_are_those_with_the_best_scores(engine: FusedKVEngine, selector: str) -> None:
    trace = traced(engine, selector)
    assert trace.selection is not None
    in_chunks = np.flatnonzero(trace.kind >= 0)
    total, layers = trace.selection.total, trace.selection.layers
    assert trace.selection.scores.shape == (len(layers), len(in_chunks))
    assert set(layers) <= set(range(trace.model_layers))
    if selector == "sink_attention":
        np.testing.assert_allclose(total, ranked(trace, trace.selection.scores.mean(0)), rtol=1e-4)
        chosen = np.isin(in_chunks, trace.recomputed)
        assert 0 < chosen.sum() < len(in_chunks)
        assert total[chosen].min() >= total[~chosen].max()


@pytest.mark.parametrize(("preprocessing", "layers"), [("none", (0,)), ("similar", (0, 1))])
def test_the_default_scores_in_later_layers_too_where_shifts_are_added(
    preprocessing: Literal["none", "similar"], layers: tuple[int, ...], tmp_path: Path
) -> None:
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing=preprocessing
    ) as engine:
        engine.build_kv_cache(SHORT[:3], preprocess="background", progress=False)
        trace = traced(engine, "sink_attention")
    assert trace.selection is not None
    assert trace.selection.layers == layers
    # Two layers are two groups, whose geometric mean counts.
    attention = trace.selection.scores.prod(0) ** (1 / len(layers))
    np.testing.assert_allclose(trace.selection.total, ranked(trace, attention), rtol=1e-4)


def test_plain_data_says_the_same(engine: FusedKVEngine) -> None:
    trace = traced(engine, "sink_attention")
    plain = json.loads(json.dumps(trace.to_dict()))
    assert trace.selection is not None
    np.testing.assert_allclose(plain["selection"]["scores"], trace.selection.scores, rtol=1e-3)
    assert [score is not None for score in plain["selection"]["total"]] == [kind >= 0 for kind in plain["chunk"]]


def test_nothing_is_kept_that_nobody_asked_for(engine: FusedKVEngine) -> None:
    assert traced(engine, "sink_attention", scores=False).selection is None
    assert traced(engine, "random").selection is None
    assert traced(engine, "random").to_dict()["selection"] is None


def test_the_estimate_goes_by_the_mean_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the geometric mean that ranks the tokens, which is no share of anything."""
    seen = list[float]()

    def noted(uncovered: float, deviations: list[tuple[float, int]]) -> float:
        seen.append(uncovered)
        return expected_divergence(uncovered, deviations)

    monkeypatch.setattr("fused_kv_llm.online.fusion.expected_divergence", noted)
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine:
        engine.build_kv_cache(SHORT[:3], preprocess="background", progress=False)
        trace = traced(engine, "sink_attention")
    assert trace.selection is not None
    assert trace.selection.layers == (0, 1)
    left = ~np.isin(np.flatnonzero(trace.kind >= 0), trace.recomputed)
    assert seen == [pytest.approx(trace.selection.scores.mean(0)[left].sum(), rel=1e-3)]
