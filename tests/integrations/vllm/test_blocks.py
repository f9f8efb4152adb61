"""Blocks out of vLLM's caches, and into them."""

from __future__ import annotations

import pytest
import torch
from integrations.vllm.requests import BLOCK, HEADS, LAYERS, WIDTH, block_caches, caches

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_vllm.blocks import BlockCaches, BlockLayout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel_block", [BLOCK, BLOCK // 2])
def test_blocks_come_back_bit_for_bit_at_other_places(dtype: torch.dtype, kernel_block: int) -> None:
    source = caches(1, kernel_block=kernel_block, dtype=dtype)
    target = caches(2, kernel_block=kernel_block, dtype=dtype)
    before = {name: cache.clone() for name, cache in target.items()}
    keys, values = BlockCaches(source, BLOCK, "PLAIN").gather([5, 0, 7])
    assert keys.shape == values.shape == (LAYERS, HEADS, 3 * BLOCK, WIDTH // 2)
    BlockCaches(target, BLOCK, "PLAIN").scatter(keys, values, [2, 9, 3])
    each = BLOCK // kernel_block
    for name, cache in target.items():
        rows = before[name].unflatten(0, (-1, each))
        wanted = source[name].unflatten(0, (-1, each))
        for there, here in zip([2, 9, 3], [5, 0, 7], strict=True):
            rows[there] = wanted[here]
        assert torch.equal(cache, rows.flatten(0, 1))


def test_tokens_stand_in_their_order() -> None:
    numbered = caches()
    for cache in numbered.values():
        cache.copy_((torch.arange(cache.shape[0] * BLOCK).view(-1, 1, BLOCK, 1)).expand_as(cache))
    keys, _ = BlockCaches(numbered, BLOCK, "PLAIN").gather([3, 1])
    assert keys[0, 0, :, 0].tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


def test_blocks_at_the_beginning_are_left_out() -> None:
    source, target = block_caches(1), caches(2)
    before = {name: cache.clone() for name, cache in target.items()}
    keys, values = source.gather([4, 5])
    written = BlockCaches(target, BLOCK, "PLAIN")
    written.scatter(keys, values, [6], skipped=1)
    again = written.gather([6])
    assert torch.equal(again[0], keys[:, :, BLOCK:])
    assert torch.equal(again[1], values[:, :, BLOCK:])
    changed = [(cache != before[name]).flatten(1).any(1).nonzero().flatten().tolist() for name, cache in target.items()]
    assert changed == [[6]] * LAYERS


def test_what_was_gathered_does_not_change_with_the_caches() -> None:
    source = caches(1)
    made = BlockCaches(source, BLOCK, "PLAIN")
    keys, values = made.gather([1])
    kept = keys.clone(), values.clone()
    for cache in source.values():
        cache.zero_()
    assert torch.equal(keys, kept[0])
    assert torch.equal(values, kept[1])


def test_layers_are_ordered_by_their_numbers() -> None:
    made = {f"model.layers.{n}.attn": torch.full((4, 1, BLOCK, 2), float(n)) for n in (10, 2, 1)}
    keys, _ = BlockCaches(made, BLOCK, "PLAIN").gather([0])
    assert keys[:, 0, 0, 0].tolist() == [1.0, 2.0, 10.0]


def test_the_layout_says_what_blocks_look_like() -> None:
    assert block_caches().layout == BlockLayout("PLAIN", "bfloat16", LAYERS, HEADS, BLOCK, WIDTH)


@pytest.mark.parametrize(
    "odd",
    [
        {"other": torch.zeros(32, HEADS, BLOCK, 2 * WIDTH, dtype=torch.bfloat16)},
        {"other": torch.zeros(32, HEADS, BLOCK, WIDTH)},
    ],
)
def test_layers_that_differ_are_refused(odd: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="2 different shapes"):
        BlockCaches(caches() | odd, BLOCK, "PLAIN")


@pytest.mark.parametrize(
    "cache", [torch.zeros(8, 2, 4, 8, dtype=torch.uint8), torch.zeros(8, 4, 8), torch.zeros(8, 2, 3, 8)]
)
def test_caches_of_another_kind_are_refused(cache: torch.Tensor) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be stored"):
        BlockCaches({"layer": cache}, BLOCK, "PLAIN")
