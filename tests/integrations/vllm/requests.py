"""Requests and steps with what the connector reads of vLLM's, and caches as vLLM has them, where vLLM is not installed.

`make test-vllm` runs the connector in vLLM itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fused_kv_vllm.blocks import BlockCaches, BlockLayout
from fused_kv_vllm.identity import PrefixIdentity
from fused_kv_vllm.spans import PrefixSpan, prefix_spans

BLOCK, SPAN_BLOCKS = 4, 2
SPAN = BLOCK * SPAN_BLOCKS
LAYERS, HEADS, WIDTH, BLOCKS = 3, 2, 8, 32
PROMPT = list(range(100, 100 + 3 * SPAN + 3))


def caches(seed: int = 0, *, kernel_block: int = BLOCK, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    shape = BLOCKS * BLOCK // kernel_block, HEADS, kernel_block, WIDTH
    return {f"model.layers.{n}.attn": torch.randn(shape, generator=made).to(dtype) for n in range(LAYERS)}


def block_caches(seed: int = 0) -> BlockCaches:
    return BlockCaches(caches(seed), BLOCK, "PLAIN")


def identity(**changes: Any) -> PrefixIdentity:
    values: dict[str, Any] = {
        "model": "0" * 32,
        "dtype": "bfloat16",
        "settings": {"hidden_size": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "max_model_len": 4096,
        "computed_by": "0.32.0, None",
        "layout": BlockLayout("PLAIN", "bfloat16", LAYERS, HEADS, BLOCK, WIDTH),
    }
    return PrefixIdentity(**values | changes)


def spans(token_ids: Sequence[int] = PROMPT, salt: str | None = None, **changes: Any) -> list[PrefixSpan]:
    return prefix_spans(identity(**changes).of_tenant(salt).digest, token_ids, SPAN)


def request(name: str = "a", token_ids: Sequence[int] | None = PROMPT, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": token_ids,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
    }
    return SimpleNamespace(**values | changes)


def first_step(name: str, blocks: Sequence[int], computed: int, scheduled: int) -> Any:
    """A step in which a request is scheduled for the first time."""
    new = SimpleNamespace(req_id=name, block_ids=(list(blocks),), num_computed_tokens=computed)
    return _step([new], [], {name: scheduled})


def next_step(
    name: str, new_blocks: Sequence[int] | None, computed: int, scheduled: int, *, resumed: bool = False
) -> Any:
    """A step in which a request goes on, or begins again after others had taken its blocks."""
    return _step([], [(name, new_blocks, computed, resumed)], {name: scheduled})


def empty_step() -> Any:
    return _step([], [], {})


def _step(new: list[Any], cached: list[tuple[str, Sequence[int] | None, int, bool]], scheduled: dict[str, int]) -> Any:
    running = SimpleNamespace(
        req_ids=[name for name, *_ in cached],
        resumed_req_ids={name for name, _, _, resumed in cached if resumed},
        new_block_ids=[None if blocks is None else (list(blocks),) for _, blocks, _, _ in cached],
        num_computed_tokens=[computed for _, _, computed, _ in cached],
    )
    total = sum(scheduled.values())
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=running,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=total,
    )
