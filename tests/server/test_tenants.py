"""Tenants with equal documents do not see each other's, by key or by the name that a client gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.refusals import RefusedError
from fused_kv_llm.server.tenants import Tenants

KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}
PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        yield made


def ask(url: str, key: str, **fused_kv: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1, "fused_kv": fused_kv}
    response = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    assert response.status_code == 200, response.text
    return response.json()["fused_kv"]


def test_nothing_crosses(engine: FusedKVEngine) -> None:
    app = create_app(engine, ServerConfig(model_name="tiny", api_keys=KEYS))
    with running(app) as url:
        with app.state.fused_kv.tenants.using("one") as of_one:
            of_one.build_kv_cache(SHORT[:3], progress=False)
        assert ask(url, KEYS["one"])["chunks_found"] == 3
        # The second time from the tree of prompts, which is one tenant's too.
        assert ask(url, KEYS["one"])["prefix_cache_tokens"] > 0
        for other, name in ((KEYS["two"], None), (KEYS["one"], "user"), (KEYS["two"], "one"), (KEYS["two"], "/one")):
            report = ask(url, other, **({} if name is None else {"tenant": name}))
            assert (report["chunks_found"], report["prefix_cache_tokens"]) == (0, 0)


def test_opening_a_tenants_engine_holds_up_nobody(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(engine, ServerConfig(model_name="tiny", api_keys=KEYS))
    tenants, opening, may_open = app.state.fused_kv.tenants, threading.Event(), threading.Event()
    opened = tenants._opened

    def slow(name: str) -> FusedKVEngine:
        if name == "two":
            opening.set()
            assert may_open.wait(30)
        return opened(name)

    monkeypatch.setattr(tenants, "_opened", slow)
    with running(app) as url, ThreadPoolExecutor() as threads, ExitStack() as done:
        done.enter_context(tenants.using("one"))
        waiting = threads.submit(ask, url, KEYS["two"])
        try:
            assert opening.wait(30)
            assert httpx.get(f"{url}/health", timeout=5).status_code == 200
            # Who has done with an engine does not wait either.
            threads.submit(done.close).result(5)
        finally:
            may_open.set()
        assert waiting.result()["prompt_tokens"] > 0


def test_names_cannot_be_forged(engine: FusedKVEngine) -> None:
    tenants = Tenants(engine, 8)
    names = [tenants.name(tenant, apart) for tenant in ("a", "a/b", "a%2Fb") for apart in (None, "b", "b/c", "/")]
    assert len(set(names)) == len(names)


def test_idle_tenants_make_room_and_busy_ones_do_not(engine: FusedKVEngine) -> None:
    tenants = Tenants(engine, 2)
    with tenants.using("") as default:
        assert default is engine
    with tenants.using("a") as first:
        with tenants.using("b") as second:
            pass
        with tenants.using("c"):
            assert second.closed
            assert not first.closed
            with pytest.raises(RefusedError) as caught, tenants.using("d"):
                pass
            assert caught.value.status == 503
    with ExitStack() as entered:
        again = [entered.enter_context(tenants.using("a")) for _ in range(3)]
        assert all(one is first for one in again)
    tenants.close()
    assert first.closed
    assert not engine.closed
