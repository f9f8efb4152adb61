"""An engine's store: its budgets, its remote tier, and the dtype in which it keeps KV."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from typer.testing import CliRunner

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.adapter import sharing
from fused_kv_llm.cli import app
from fused_kv_llm.errors import ConfigError, StoreFullError
from langchain_fused_kv import FusedKVLLM

TEXTS = SHORT[:6]
PROMPT = rag_prompt(TEXTS)


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    options = {"preprocessing": "none", "store_misses": False, "prefix_cache_bytes": 0, **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_bytes": "much"}, "memory_bytes='much' is not a size"),
        ({"disk_bytes": "-1GB"}, "disk_bytes='-1GB' is not a size"),
        ({"policy": "random"}, "policy='random'"),
        ({"kv_dtype": "int3"}, "kv_dtype='int3' is unknown: use auto, float32"),
        ({"remote": "somewhere"}, "remote='somewhere' is not a URL"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FusedKVEngine("a model that is never looked for", kv_dir=tmp_path, preprocessing="none", **options)


def test_sizes_are_those_that_people_write(tmp_path: Path) -> None:
    with make_engine(tmp_path, memory_bytes="64MB", disk_bytes="1GiB") as engine:
        assert engine.config.memory_bytes == 64_000_000
        assert engine.store.stats().disk_bytes == 1 << 30


def test_a_budget_holds_over_several_ingestions(tmp_path: Path) -> None:
    with make_engine(tmp_path / "all") as engine:
        engine.build_kv_cache(SHORT[:20], progress=False)
        whole = engine.store.stats().bytes_on_disk
    with make_engine(tmp_path / "part", disk_bytes=whole // 2, policy="lru") as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        engine.build_kv_cache(SHORT[6:12], progress=False)
        stats = engine.store.stats()
        assert whole // 4 < stats.bytes_on_disk <= whole // 2
        assert 0 < stats.chunks < 12
        # The last ones are there, what was evicted is computed afresh.
        assert engine.prefill(rag_prompt(SHORT[8:12]))[1].chunks_found == 4
        first = engine.prefill(PROMPT, recompute_ratio=0.0)[1]
        assert first.chunks_found < len(TEXTS)
        assert first.reused_tokens + first.recomputed_tokens < first.prompt_tokens


def test_a_corpus_larger_than_the_budget_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    with make_engine(tmp_path, disk_bytes=20_000) as engine:
        with pytest.raises(StoreFullError, match="raise disk_bytes or give the store a remote tier"):
            engine.build_kv_cache(SHORT[:20], progress=False)
        assert engine.store.stats().chunks == 0


@pytest.mark.parametrize("preprocessing", ["none", "similar"])
def test_with_a_remote_tier_a_corpus_may_be_larger_than_the_budget(tmp_path: Path, preprocessing: str) -> None:
    options = {"remote": f"file://{tmp_path / 'remote'}", "disk_bytes": 400_000, "preprocessing": preprocessing}
    with make_engine(tmp_path / "kv", **options, memory_bytes=0) as engine:
        assert engine.build_kv_cache(SHORT[:30], preprocess="wait", progress=False).chunks_new == 30
        tiers = engine.store.stats().tiers
        assert tiers["disk"][1] <= 400_000 < tiers["disk"][1] + tiers["remote"][1]
        report = engine.prefill(PROMPT, recompute_ratio=0.0)[1]
        assert report.chunks_found == len(TEXTS)
        assert report.bytes_loaded["remote"] > 0


def test_evicted_chunks_come_back_from_the_remote_tier(tmp_path: Path) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    with make_engine(tmp_path / "kv", remote=remote, memory_bytes=0) as engine:
        engine.build_kv_cache(TEXTS, progress=False)
        here = engine.generate(PROMPT, max_tokens=4, recompute_ratio=0.0)
        engine.store.evict(0)
        assert engine.store.stats().tiers["disk"] == (0, 0)
        back = engine.generate(PROMPT, max_tokens=4, recompute_ratio=0.0)
    assert back.token_ids == here.token_ids
    assert back.report.chunks_found == here.report.chunks_found == len(TEXTS)
    assert back.report.bytes_loaded["remote"] == here.report.bytes_loaded["disk"] > 0


@pytest.mark.parametrize(("kv_dtype", "share"), [("bfloat16", 0.5), ("int8", 0.3)])
def test_a_smaller_dtype_is_smaller_and_near(tmp_path: Path, kv_dtype: str, share: float) -> None:
    with make_engine(tmp_path / "auto") as engine:
        exact = engine.build_kv_cache(TEXTS, progress=False)
        want = engine.prefill(PROMPT, recompute_ratio=0.0)[0].logits
    with make_engine(tmp_path / kv_dtype, kv_dtype=kv_dtype, memory_bytes=0) as engine:
        written = engine.build_kv_cache(TEXTS, progress=False)
        fused, report = engine.prefill(PROMPT, recompute_ratio=0.0)
        assert report.chunks_found == len(TEXTS)
        assert engine.kv_dtype == kv_dtype
        assert f"stored in {kv_dtype}" in engine.store.stats().identities[0].name
        distance = (fused.logits - want).abs().max() / want.std()
        assert 0 < distance < 0.1
        # Whatever is stored, recomputing everything is full prefill.
        plain = copy.deepcopy(engine.model)
        plain.set_attn_implementation("sdpa")
        with torch.inference_mode():
            logits = plain(torch.tensor([engine.encode(PROMPT)])).logits[0, -1].float()
        torch.testing.assert_close(engine.prefill(PROMPT, recompute_ratio=1.0)[0].logits, logits, atol=1e-4, rtol=1e-4)
    # Headers take a part of files as small as these.
    assert written.bytes_written < (share + 0.3) * exact.bytes_written


def test_kv_of_another_storage_dtype_is_not_found(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, progress=False)
        identity = engine.identity
    with make_engine(tmp_path, kv_dtype="int8") as engine:
        assert engine.identity != identity
        assert engine.prefill(PROMPT)[1].chunks_found == 0
    with make_engine(tmp_path, kv_dtype="float32") as engine:
        # The model's own dtype by its name.
        assert (engine.identity, engine.kv_dtype) == (identity, "auto")
        assert engine.prefill(PROMPT)[1].chunks_found == len(TEXTS)


def test_framework_objects_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_entries", {})
    options = {"model": tiny_model(), "tokenizer": smollm2_tokenizer(), "kv_dir": tmp_path, "preprocessing": "none"}
    one = FusedKVLLM(**options, memory_bytes="1GB", disk_bytes="2GB", policy="lru", kv_dtype="int8")
    same = FusedKVLLM(**options, memory_bytes=10**9, disk_bytes=2 * 10**9, policy="lru", kv_dtype="int8")
    other = FusedKVLLM(**options, memory_bytes="1GB", disk_bytes="2GB", policy="lru")
    assert one.engine is same.engine is not other.engine
    assert one.engine.store.stats().disk_bytes == 2 * 10**9
    assert (one.engine.kv_dtype, other.engine.kv_dtype) == ("int8", "auto")
    for llm in (one, same, other):
        llm.close()
    with pytest.raises(ConfigError, match="disk_bytes='lots'"):
        FusedKVLLM(**options, disk_bytes="lots")


def test_the_command_line_keeps_how_a_corpus_was_stored(tmp_path: Path) -> None:
    (tmp_path / "ferries.txt").write_text(" ".join(SHORT[:2]), encoding="utf-8")
    kv_dir = ["--kv-dir", str(tmp_path / "kv")]
    run = CliRunner(env={"COLUMNS": "200"}).invoke
    made = run(app, ["ingest", str(tmp_path / "ferries.txt"), *kv_dir, "--kv-dtype", "int8", "--disk-bytes", "1GB"])
    assert made.exit_code == 0, made.output
    asked = run(app, ["ask", "When do the ferries sail?", *kv_dir, "--max-tokens", "2"])
    assert asked.exit_code == 0, asked.output
    assert "chunk" in asked.output
    assert ", 0 of" not in asked.output
    stats = run(app, ["store", "stats", *kv_dir])
    assert "stored in int8" in stats.output
    refused = run(app, ["ingest", str(tmp_path), *kv_dir, "--disk-bytes", "lots"])
    assert refused.exit_code == 1
    assert "disk_bytes='lots'" in refused.output
