"""Layer-wise loading: the same KV from disk and from memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.store import StoredKV, StoredLayers


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.2])
def test_disk_and_memory_give_the_same_logits(
    ratio: float, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fused_kv_llm.engine.requests.reader_threads", lambda device: threads)
    with FusedKVEngine(tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        engine.store.drop_memory()
        cold, first = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=ratio)
        warm, second = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=ratio)
        assert set(first.bytes_loaded) == {"disk"}
        assert set(second.bytes_loaded) == {"memory"}
        assert first.bytes_loaded["disk"] == second.bytes_loaded["memory"] > 0
        assert torch.equal(cold.logits, warm.logits)
        assert torch.equal(cold.selected, warm.selected)


def test_without_a_memory_tier_everything_comes_from_disk(tmp_path: Path) -> None:
    with FusedKVEngine(
        tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, memory_bytes=0
    ) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        for _ in range(2):
            _, report = engine.prefill(rag_prompt(SHORT[:3]), recompute_ratio=0.0)
            assert set(report.bytes_loaded) == {"disk"}


def test_prefetch_brings_chunks_into_memory(tmp_path: Path) -> None:
    with FusedKVEngine(tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        engine.store.drop_memory()
        keys = engine.prefetch([*SHORT[:3], SHORT[9]])
        assert [key is None for key in keys] == [False, False, False, True]
        deadline = time.monotonic() + 30
        while engine.store.stats().memory_chunks < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        _, report = engine.prefill(rag_prompt(SHORT[:3]), recompute_ratio=0.0)
        assert set(report.bytes_loaded) == {"memory"}


def _placed_kv(engine: FusedKVEngine) -> torch.Tensor:
    fused, report = engine.prefill(rag_prompt(SHORT[:4]), recompute_ratio=0.0)
    assert report.trace is not None
    placed = torch.from_numpy(report.trace.kind >= 0).nonzero()[:, 0]
    assert len(placed) > 50
    return torch.stack([fused.cache.keys, fused.cache.values])[..., placed, :].float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_placed_without_a_copy_in_between(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From both tiers and by every implementation the cache gets what dequantising first gives, or nearer to it."""
    model = tiny_model(hidden_size=96).to(dtype)
    with FusedKVEngine(
        model, preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, kv_dtype="int8"
    ) as engine:
        engine.build_kv_cache(SHORT[:4], progress=False)
        engine.store.drop_memory()
        got = {"disk": _placed_kv(engine)}
        monkeypatch.setattr(StoredKV, "read_layers", lambda *_: pytest.fail("int8 was dequantised on its own"))
        got["memory"] = _placed_kv(engine)
        monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
        got["torch"] = _placed_kv(engine)
        monkeypatch.undo()
        # Dequantised before it is placed.
        monkeypatch.setattr(StoredKV, "read_stored", lambda self, *layers: StoredLayers(*self.read_layers(*layers)))
        want = _placed_kv(engine)
    assert torch.equal(got["disk"], got["memory"])
    # What was dequantised to bfloat16 first is rounded before it is turned, by up to 2^-9 of the pair.
    tolerance = (1e-6 if dtype == torch.float32 else 2**-7) * float(want.abs().max())
    for name in ("disk", "torch"):
        torch.testing.assert_close(got[name], want, atol=tolerance, rtol=0)


FORK = """
import os, sys
import torch
from pathlib import Path
import fused_kv_llm.engine.parts
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

torch.set_num_threads(1)
fused_kv_llm.engine.requests.reader_threads = lambda device: 2
engine = fused_kv_llm.FusedKVEngine(
    tiny_model(), preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=Path(sys.argv[1]), memory_bytes=0
)
engine.build_kv_cache(SHORT[:3], progress=False)
want = engine.prefill(rag_prompt(SHORT[:3]), recompute_ratio=0.2)[0].logits
child = os.fork()
got = engine.prefill(rag_prompt(SHORT[:3]), recompute_ratio=0.2)[0].logits
engine.close()
same = torch.equal(got, want)
if child == 0:
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or (0 if same else 4))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_forked_process_has_readers_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], env=environment, timeout=120, check=False)
    assert done.returncode == 0
