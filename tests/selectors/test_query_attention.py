"""FusionRAG's and QCFuse's scores (QCFuse equations 10, 11, 18 and 20), by hand on two layers of two heads."""

from __future__ import annotations

import math

import pytest
import torch

from fused_kv_kernels import token_scores
from fused_kv_llm.selectors import Probe, budget_tokens, resolve_selector

_HEADS, _DIM = 2, 4
_CONTEXT = range(1, 8)
_QUESTION = (8, 9)
"""One token of a header, seven of a context, two of a question."""


def _attention(q: list[list[float]], k: list[list[float]], rows: tuple[int, ...]) -> list[list[float]]:
    """Softmax weights of one head, written out: row i sees the keys up to its own place."""
    found = []
    for query, place in zip(q, rows, strict=True):
        products = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(_DIM) for key in k[: place + 1]]
        total = sum(math.exp(product) for product in products)
        found.append([math.exp(product) / total for product in products] + [0.0] * (len(k) - place - 1))
    return found


def _layers(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(_HEADS, len(_QUESTION), _DIM, generator=draw), torch.randn(_HEADS, 10, _DIM, generator=draw))
        for _ in range(3)
    ]


def _by_hand(layer: tuple[torch.Tensor, torch.Tensor]) -> list[float]:
    """Equation 18: I_l(t), the columns of the question's attention summed over its rows and heads."""
    q, k = (part.tolist() for part in layer)
    weights = [row for head in range(_HEADS) for row in _attention(q[head], k[head], _QUESTION)]
    return [sum(row[t] for row in weights) for t in _CONTEXT]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "layers"), [("prophetkv", (0, 1, 2)), ("qcfuse", (0, 2)), ("fusionrag", (2,))])
def test_the_best_tokens_of_the_summed_attention_are_taken(name: str, layers: tuple[int, ...], seed: int) -> None:
    """Equation 10 sums over all layers, equation 20 over the critical ones; FusionRAG section 3.2 has the last only."""
    seen = _layers(seed)
    parts = [_by_hand(seen[layer]) for layer in layers]
    importance = [sum(part[t] for part in parts) for t in range(len(_CONTEXT))]
    # What the engine computes: means, which rank alike.
    rows = torch.tensor(_QUESTION)
    scores = torch.stack([token_scores(*seen[layer], rows, _DIM**-0.5) for layer in layers]).mean(0)[list(_CONTEXT)]
    count = _HEADS * len(_QUESTION) * len(layers)
    torch.testing.assert_close(scores, torch.tensor(importance) / count, atol=1e-6, rtol=1e-5)
    positions = torch.tensor(list(_CONTEXT))
    probe = Probe(positions, torch.zeros_like(positions), positions - 1, scores=scores)
    # Equation 11: the floor(rho N) best, of seven tokens at 0.45 three.
    best = sorted(range(len(_CONTEXT)), key=lambda t: -importance[t])[: math.floor(0.45 * len(_CONTEXT))]
    chosen = resolve_selector(name).select(probe, budget_tokens(0.45, len(_CONTEXT)))
    assert chosen.tolist() == sorted(_CONTEXT[t] for t in best)


def test_the_presets_look_where_their_papers_say() -> None:
    fusionrag, prophetkv, qcfuse = (resolve_selector(name).view(30) for name in ("fusionrag", "prophetkv", "qcfuse"))
    assert (fusionrag.layers, fusionrag.full_context, fusionrag.anchors) == ((29,), False, None)  # type: ignore[union-attr]
    assert (prophetkv.layers, prophetkv.full_context) == (tuple(range(30)), True)  # type: ignore[union-attr]
    assert qcfuse.critical  # type: ignore[union-attr]
    assert (qcfuse.anchors.rule, qcfuse.anchors.ratio) == ("kvzip", 0.1)  # type: ignore[union-attr]
