"""Requests in one pass: each gets what it would get alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import smollm2_tokenizer, tiny_model
from tiny_families import tiny_model as tiny_family
from torch import Tensor

from fused_kv_llm.model import (
    CachePool,
    ForwardPass,
    FusedCache,
    LoadedModel,
    RaggedError,
    RaggedPart,
    forward_ragged,
    forward_rows,
    load_model,
)

CAPACITY = 48
# Windows, caps, sinks, keys that are interleaved or not rotated, layers behind norms of their own, packed projections,
# KV of several shapes, layers that share it.
KINDS = ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "phi3", "glm4", "qwen3_moe", "gpt_neox",
         "gemma3n_text", "gemma4_text", "mimo_v2_flash"]  # fmt: skip


class OneRequest:
    """A request of a tiny model whose first tokens are in its cache."""

    def __init__(self, loaded: LoadedModel, seed: int, length: int) -> None:
        self.loaded = loaded
        vocabulary = loaded.model.config.get_text_config().vocab_size
        self.ids = torch.randint(5, vocabulary, (length,), generator=torch.Generator().manual_seed(seed))
        self.cache = FusedCache(loaded.geometry, CAPACITY, CachePool(loaded.dtype, loaded.device))
        self.cache.keys.zero_()
        self.cache.values.zero_()

    def part(self, rows: Tensor) -> RaggedPart:
        """Return these rows of the request, as a part."""
        last = self.loaded.geometry.last_layer
        return RaggedPart(self.ids[rows], self.cache, ForwardPass(rows, int(rows[-1]) + 1, final_layer=last))

    def alone(self, rows: Tensor) -> Tensor:
        """Return the last row's logits from a pass of this request alone."""
        part = self.part(rows)
        return forward_rows(self.loaded, part.ids[None], rows, self.cache, part.forward_pass)[-1]


def slices(request: OneRequest, cuts: list[int]) -> list[Tensor]:
    """Return the request's rows, cut."""
    bounds = [0, *sorted(set(cuts) & set(range(1, len(request.ids)))), len(request.ids)]
    return [torch.arange(a, b) for a, b in pairwise(bounds)]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 39), max_size=3)), min_size=1, max_size=5))
def test_requests_together_get_what_they_get_alone(shapes: list[tuple[int, list[int]]]) -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    with torch.inference_mode():
        check_together(loaded, shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_takes_several_requests(kind: str) -> None:
    loaded = load_model(tiny_family(kind), tokenizer=smollm2_tokenizer())
    with torch.inference_mode():
        check_together(loaded, [(30, [11, 12, 29]), (1, []), (40, [39]), (17, [4])])


def check_together(loaded: LoadedModel, shapes: list[tuple[int, list[int]]]) -> None:
    alone = [OneRequest(loaded, seed, length) for seed, (length, _) in enumerate(shapes)]
    together = [OneRequest(loaded, seed, length) for seed, (length, _) in enumerate(shapes)]
    wanted = [[one.alone(rows) for rows in slices(one, cuts)] for one, (_, cuts) in zip(alone, shapes, strict=True)]
    left = [slices(one, cuts) for one, (_, cuts) in zip(together, shapes, strict=True)]
    for step in range(max(map(len, left))):
        present = [index for index, rows in enumerate(left) if step < len(rows)]
        got = forward_ragged(loaded, [together[index].part(left[index][step]) for index in present])
        for index, logits in zip(present, got, strict=True):
            torch.testing.assert_close(logits, wanted[index][step], atol=1e-4, rtol=1e-4)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.cache.keys, other.cache.keys, atol=1e-5, rtol=1e-5)


def test_latent_attention_is_run_request_by_request() -> None:
    loaded = load_model(tiny_family("deepseek_v3"), tokenizer=smollm2_tokenizer())
    with torch.inference_mode():
        check_together(loaded, [(20, [19]), (9, [])])


class Broken:
    """A loader that cannot read."""

    def fill(self, layer_idx: int) -> None:
        if layer_idx == 2:
            raise OSError("no such block")


def test_a_part_that_fails_is_named_and_the_others_can_go_on() -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    with torch.inference_mode():
        good, bad, wanted = (OneRequest(loaded, seed, 12) for seed in (1, 2, 1))
        rows = torch.arange(12)
        broken = RaggedPart(bad.ids, bad.cache, ForwardPass(rows, 12, [Broken()], loaded.geometry.last_layer))
        with pytest.raises(RaggedError) as raised:
            forward_ragged(loaded, [good.part(rows), broken])
        assert (raised.value.index, str(raised.value.cause)) == (1, "no such block")
        (logits,) = forward_ragged(loaded, [good.part(rows)])
        torch.testing.assert_close(logits, wanted.alone(rows))


def test_logits_that_are_no_numbers_are_the_error_of_their_request() -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    with torch.inference_mode():
        good, bad = OneRequest(loaded, 1, 12), OneRequest(loaded, 2, 12)
        rows = torch.arange(12)
        for one in (good, bad):
            one.alone(rows[:-1])
        bad.cache.keys[1, 0, 0, 3] = torch.nan
        with pytest.raises(RaggedError, match="not numbers") as raised:
            forward_ragged(loaded, [good.part(rows[-1:]), bad.part(rows[-1:])])
        assert raised.value.index == 1
