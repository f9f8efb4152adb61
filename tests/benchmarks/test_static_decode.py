"""Decoding with shapes that never change: the same tokens, and nothing that a CUDA graph could not record."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from static_decode import StaticDecoder
from torch.utils._python_dispatch import TorchDispatchMode

from fused_kv_llm import FusedKVEngine

pytestmark = pytest.mark.heavy

# What makes the host wait for the device, or copies to it from memory that is not pinned.
HOST = {"aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.lift_fresh"}


class _Watched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func).rsplit(".", 1)[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled natively in this process")
    monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
    options = {"kv_dir": tmp_path, "preprocessing": "none", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), **options) as made:
        made.build_kv_cache(SHORT[:1], progress=False)
        yield made


def test_the_same_logits_as_the_engines_own_step(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(SHORT[:1])
    eager, static = (engine.prefill(prompt, recompute_ratio=0.0, max_tokens=4)[0] for _ in range(2))
    with torch.inference_mode():  # what lies behind the last token must not be seen
        static.cache.values[:, :, :, static.cache.length :] = float("nan")
    decoder = StaticDecoder(engine.loaded, static, graph=False)
    for token in (5, 9, 11):
        want = eager.append(engine.loaded, [token])[-1]
        torch.testing.assert_close(decoder.append(token), want, atol=1e-5, rtol=1e-5)
    capacity = int(static.cache.keys.shape[3])
    while static.cache.length < capacity:
        decoder.append(3)
    with pytest.raises(ValueError, match=f"room for {capacity} tokens"):
        decoder.append(3)


def test_a_step_never_waits_for_the_device(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    static, _ = engine.prefill(rag_prompt(SHORT[:1]), recompute_ratio=0.0, max_tokens=4)
    decoder = StaticDecoder(engine.loaded, static, graph=False)
    # The interpreter does on the host what the kernel does on the device.
    kernel = lambda q, *operands, first_keys: (torch.zeros_like(q), None)  # noqa: E731
    monkeypatch.setattr(sys.modules["fused_kv_kernels.row_attention"], "triton_op", lambda name, device: kernel)
    with _Watched() as watched:
        decoder._step()
    assert "aten.index_copy_" in watched.seen
    assert HOST.isdisjoint(watched.seen)
