"""``batch_tokens``: what ingestion computes together does not depend on how fast the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.offline import prefill
from fused_kv_llm.serving import ingestion_pieces


def ingested(folder: Path, monkeypatch: pytest.MonkeyPatch, alone_s: float, batch_tokens: int | None) -> list[int]:
    """Ingest on a machine of some speed; return the tokens of every forward."""
    sizes, compute = [], prefill.prefill_packed

    def noted(loaded, chunks, prefix):
        sizes.append(sum(len(chunk.token_ids) for chunk in chunks))
        return compute(loaded, chunks, prefix)

    monkeypatch.setattr(prefill, "prefill_packed", noted)
    monkeypatch.setattr(ingestion_pieces, "_ALONE_S", alone_s)
    options = {"preprocessing": "none", "batch_tokens": batch_tokens}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as engine:
        engine.build_kv_cache(SHORT, progress=False)
    monkeypatch.undo()
    return sizes


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "chunks").rglob("*.safetensors")}


def test_the_same_batches_whatever_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ingested(tmp_path / "slow", monkeypatch, 1e-9, 128)
    fast = ingested(tmp_path / "fast", monkeypatch, 1e9, 128)
    assert slow == fast
    assert 1 < len(slow) < len(SHORT)
    assert files(tmp_path / "slow") == files(tmp_path / "fast")
    # Without it, the clock decides.
    assert ingested(tmp_path / "one", monkeypatch, 1e-9, None) != ingested(tmp_path / "two", monkeypatch, 1e9, None)


def test_numbers_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_tokens"):
        FusedKVEngine("smollm2-135m", kv_dir=tmp_path, batch_tokens=0)
