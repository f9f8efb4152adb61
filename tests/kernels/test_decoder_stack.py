"""Several decoder layers in one call: bit by bit what their operators give layer by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused_kv_kernels import (
    DecodeCaches,
    LayerWeights,
    decode_attention,
    decode_layers,
    decoder_stack,
    few_row_heads,
    few_row_mlp,
    why_not_native,
)

LAYERS, FIRST = 3, 1
needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
Heads = tuple[int, int, int]


class Case:
    """Layers of random weights, and a new token of each of several sequences."""

    def __init__(
        self, lengths: list[int], heads: Heads, hidden: int, width: int, *, dtype: torch.dtype, extras: bool = False
    ) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(len(lengths)), dtype
        _, keys, dim = heads
        self.x = self.drawn(1, len(lengths), hidden).float()
        self.tables = self.drawn(1, len(lengths), dim), self.drawn(1, len(lengths), dim)
        self.layers = [self.layer(heads, hidden, width, extras) for _ in range(LAYERS)]
        shape = FIRST + LAYERS, 1, keys
        self.caches = [(self.drawn(*shape, n + 3, dim), self.drawn(*shape, n + 3, dim)) for n in lengths]
        self.positions = [length - 1 for length in lengths]

    def drawn(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * 0.5).to(self.dtype)

    def linear(self, inner: int, outputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        return self.drawn(outputs, inner), self.drawn(outputs) if bias else None

    def layer(self, heads: Heads, hidden: int, width: int, extras: bool) -> LayerWeights:
        queries, keys, dim = heads
        return LayerWeights(
            norm=(self.drawn(hidden), 1e-5),
            heads=[self.linear(hidden, count * dim, extras) for count in (queries, keys, keys)],
            head_norms=(self.drawn(dim), self.drawn(dim), 1e-6) if extras else None,
            output=self.linear(queries * dim, hidden, extras),
            mlp_norm=(self.drawn(hidden), 2e-5),
            mlp=(self.linear(hidden, width, extras), self.linear(hidden, width, extras),
                 self.linear(width, hidden, extras)),
        )  # fmt: skip

    def copied(self) -> DecodeCaches:
        """Return copies of the caches, which a call writes to."""
        return DecodeCaches([(keys.clone(), values.clone()) for keys, values in self.caches], self.positions)

    def one_by_one(self, caches: DecodeCaches, first_keys: Tensor | None) -> Tensor:
        x = self.x
        for index, layer in enumerate(self.layers):
            dim = caches.caches[0][0].shape[4]
            q, k, v = few_row_heads(x, *layer.norm, layer.heads, *self.tables, dim, layer.head_norms)
            attended = decode_attention(q, k, v, caches, FIRST + index, 0.3, first_keys=first_keys)
            x = few_row_mlp(x, *layer.mlp_norm, *layer.mlp, (attended.transpose(1, 2).flatten(2), layer.output))
        return x


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    heads=st.sampled_from([(3, 1, 64), (4, 2, 16), (9, 3, 64), (2, 2, 48), (3, 3, 10)]),
    sizes=st.sampled_from([(64, 96), (576, 256), (40, 96), (64, 50)]),
    options=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_layers_together_are_the_layers_one_by_one(
    lengths: list[int], heads: Heads, sizes: tuple[int, int], options: tuple[bool, bool], dtype: torch.dtype
) -> None:
    extras, windows = options
    case = Case(lengths, heads, *sizes, dtype=dtype, extras=extras)
    first_keys = torch.tensor([length // 2 for length in lengths]) if windows else None
    together, one_by_one, before = case.copied(), case.copied(), case.x.clone()
    with torch.inference_mode():
        got = decode_layers(case.x, case.layers, together, FIRST, *case.tables, 0.3, first_keys=first_keys)
        want = case.one_by_one(one_by_one, first_keys)
    assert torch.equal(got, want)
    assert torch.equal(case.x, before), "the rows that come in stay as they are"
    for pair, other in zip(together.caches, one_by_one.caches, strict=True):
        assert all(map(torch.equal, pair, other))


@needs_native
def test_layers_of_even_shapes_are_one_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("layers were computed one by one")

    case = Case([5, 130], (9, 3, 64), 576, 256, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = case.one_by_one(case.copied(), None)
        for name in ("few_row_heads", "few_row_mlp", "decode_attention"):
            monkeypatch.setattr(decoder_stack, name, refuse)
        assert torch.equal(decode_layers(case.x, case.layers, case.copied(), FIRST, *case.tables, 0.3), want)
        monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
        with pytest.raises(AssertionError, match="one by one"):
            decode_layers(case.x, case.layers, case.copied(), FIRST, *case.tables, 0.3)


def test_no_sequences_leave_nothing() -> None:
    case = Case([4], (2, 1, 16), 64, 64, dtype=torch.bfloat16)
    nothing = case.x[:, :0]
    assert decode_layers(nothing, case.layers, DecodeCaches([], []), 0, *case.tables, 0.3).shape == (1, 0, 64)


def test_what_does_not_fit_is_refused() -> None:
    """Native code trusts the shapes: each is checked before."""
    case = Case([4, 9], (4, 2, 16), 64, 96, dtype=torch.bfloat16, extras=True)
    layer, short = case.layers[0], (case.drawn(60), 1e-5)
    gate, up, down = layer.mlp

    def run(layers: list[LayerWeights], x: Tensor = case.x, first: int = FIRST) -> None:
        decode_layers(x, layers, case.copied(), first, *case.tables, 0.3)

    wrong = [
        replace(layer, norm=short),
        replace(layer, mlp_norm=short),
        replace(layer, head_norms=(case.drawn(16), case.drawn(8), 1e-6)),
        replace(layer, output=case.linear(64, 60, True)),
        replace(layer, output=case.linear(32, 64, True)),
        replace(layer, mlp=(gate, case.linear(64, 64, True), down)),
        replace(layer, mlp=(gate, up, case.linear(64, 64, True))),
        replace(layer, mlp=(gate, (up[0], case.drawn(95)), down)),
        replace(layer, heads=layer.heads[:2]),
        replace(layer, heads=[layer.heads[1], layer.heads[0], layer.heads[0]]),
        replace(layer, heads=[layer.heads[0], layer.heads[1], layer.heads[0]]),
    ]
    for one in wrong:
        with pytest.raises(ValueError, match=r"no decoder layer|do not fit"):
            run([one, one])
    with pytest.raises(ValueError, match="of several shapes"):
        run([layer, replace(layer, head_norms=None)])
    with pytest.raises(ValueError, match="are none"):
        run([])
    for wrong_rows in (case.x[:, :1], case.x.bfloat16()):
        with pytest.raises(ValueError, match="do not fit 2 caches"):
            run(case.layers, wrong_rows)
    with pytest.raises(ValueError, match="do not fit 2 caches"):
        run([Case([4], (4, 1, 16), 64, 96, dtype=torch.bfloat16).layers[0]])
    with pytest.raises(ValueError, match="not 3 from 2 on"):
        run(case.layers, first=2)
