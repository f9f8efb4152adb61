"""The pass that is being run: one for what is called inside it, in this thread, and none elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.model import CachePool, ForwardPass, FusedCache, StopForwardError, load_model
from fused_kv_llm.model.pass_context import current_pass, running


def test_a_pass_is_of_its_thread_and_ends_with_its_block() -> None:
    outer, inner = ForwardPass(torch.arange(2), 2), ForwardPass(torch.arange(3), 3)
    assert current_pass() is None
    with running(outer):
        with running(inner):
            assert current_pass() is inner
        assert current_pass() is outer
        with suppress(StopForwardError), running(inner):
            raise StopForwardError
        assert current_pass() is outer
        with ThreadPoolExecutor(1) as other:
            assert other.submit(current_pass).result() is None
    assert current_pass() is None


def test_listed_positions_are_seen_in_every_head() -> None:
    layer = torch.randn(1, 3, 10, 4)
    listed = torch.tensor([0, 2, 3, 7])
    assert torch.equal(ForwardPass(listed[2:], listed).seen(layer), layer[:, :, listed])
    assert torch.equal(ForwardPass(listed, 8).seen(layer), layer[:, :, :8])


def test_a_cache_outside_of_a_pass_is_refused() -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    cache = FusedCache(loaded.geometry, 8, CachePool(torch.float32, torch.device("cpu")))
    with torch.inference_mode(), pytest.raises(FusedKVError, match="engine's passes only"):
        loaded.model(torch.arange(4)[None], past_key_values=cache)
