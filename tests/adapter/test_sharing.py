"""One engine per model and store in a process."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest

from fused_kv_llm.adapter import sharing
from fused_kv_llm.errors import StoreError
from langchain_fused_kv import FusedKVLLM as LangChainLLM
from llama_index_fused_kv import FusedKVLLM as LlamaIndexLLM

TEXT = "The Larkspur ferries sail on every day of the year except the first of January and in heavy storms. " * 2


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_entries", {})


def test_both_frameworks_work_at_once_on_one_engine_and_one_store(tmp_path: Path) -> None:
    chain = LangChainLLM(kv_dir=tmp_path, max_tokens=4, recompute_ratio=0.0)
    index = LlamaIndexLLM(kv_dir=str(tmp_path / "." / ""), max_tokens=4, recompute_ratio=0.0)
    assert chain.engine is index.engine
    chain.build_kv_cache([TEXT], progress=False)
    prompt = f"{TEXT}\n\nWhen do the ferries not sail?"
    answers: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda: answers.update(chain=chain.invoke(prompt))),
        threading.Thread(target=lambda: answers.update(index=index.complete(prompt).text)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers["chain"] == answers["index"]
    assert chain.last_report is not None
    assert index.last_report is not None
    assert chain.last_report.reused_tokens == index.last_report.reused_tokens > 20
    chain.close()
    assert index.complete(prompt).text == answers["chain"]
    index.close()
    with pytest.raises(StoreError):
        index.complete(prompt)
    assert LangChainLLM(kv_dir=tmp_path, max_tokens=4).invoke(prompt)


def test_other_stores_share_the_weights_only(tmp_path: Path) -> None:
    one = LangChainLLM(kv_dir=tmp_path / "a")
    other = LangChainLLM(kv_dir=tmp_path / "b", dtype=one.engine.dtype, device="cpu")
    tenant = LangChainLLM(kv_dir=tmp_path / "a", tenant="x")
    assert len({id(llm.engine) for llm in (one, other, tenant)}) == 3
    assert one.engine.loaded is other.engine.loaded is tenant.engine.loaded
    # Otherwise one engine's background work would run beside another's requests.
    assert one.engine.model_lock is other.engine.model_lock is tenant.engine.model_lock
    assert one.engine.identity != tenant.engine.identity


def test_a_model_that_nobody_refers_to_gives_its_engine_back(tmp_path: Path) -> None:
    kept = LangChainLLM(kv_dir=tmp_path)
    lost = LangChainLLM(kv_dir=tmp_path)
    engine = kept.engine
    del lost
    gc.collect()
    assert not engine.closed
    del kept
    gc.collect()
    deadline = time.monotonic() + 10
    while not engine.closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.closed
    assert sharing._entries == {}
