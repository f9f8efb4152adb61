"""How far a request is that has no answer yet: whether it waits, and behind how many."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import smollm2_tokenizer, tiny_model
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    options: dict[str, Any] = {"preprocessing": "none", "dtype": "float32", "store_misses": False, "max_num_seqs": 1}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        yield made


class Asking:
    """Asks in threads, by name."""

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._url, self._pool = url, pool

    def ask(self, name: str, key: str = "any") -> Any:
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"Hello {name}"}], "max_tokens": 2}
        headers = {"x-request-id": name, "authorization": f"Bearer {key}"}
        return self._pool.submit(httpx.post, f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def progress(self, name: str, key: str = "any") -> dict[str, Any]:
        response = httpx.get(f"{self._url}/v1/requests/{name}/progress", headers={"authorization": f"Bearer {key}"})
        return response.raise_for_status().json()

    def queued(self, name: str, key: str = "any") -> dict[str, Any]:
        """Wait until a request is in the queue, or further, and return how far it is."""
        told: dict[str, Any] = {}

        def known() -> bool:
            told.update(self.progress(name, key))
            return told["state"] == "begun" or told["ahead"] is not None

        wait_until(known, timeout_s=60)
        return told


def test_who_waits_is_told_behind_how_many(own_engine: FusedKVEngine) -> None:
    with running(create_app(own_engine, ServerConfig(model_name="tiny"))) as url, ThreadPoolExecutor(4) as pool:
        asking = Asking(url, pool)
        with own_engine.model_lock:
            answers = []
            for name in ("a", "b", "c"):
                answers.append(asking.ask(name))
                asking.queued(name)
            # The first one may have begun meanwhile.
            second = asking.progress("b")["ahead"]
            assert second in (0, 1)
            assert asking.progress("c") == {"object": "request.progress", "state": "waiting", "ahead": second + 1}
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert [asking.progress(name)["state"] for name in ("a", "b", "c", "never")] == ["closed"] * 4


def test_with_keys_others_do_not_count(own_engine: FusedKVEngine) -> None:
    app = create_app(own_engine, ServerConfig(model_name="tiny", api_keys=KEYS))
    with running(app) as url, ThreadPoolExecutor(4) as pool:
        asking = Asking(url, pool)
        # Opens the tenants' engines.
        assert [asking.ask("first", key).result().status_code for key in KEYS.values()] == [200, 200]
        with own_engine.model_lock:
            answers = []
            for name in ("a", "b"):
                answers.append(asking.ask(name, KEYS["one"]))
                asking.queued(name, KEYS["one"])
            answers.append(asking.ask("b", KEYS["two"]))
            assert asking.queued("b", KEYS["two"])["ahead"] == 0
            assert asking.progress("a", KEYS["two"])["state"] == "closed"
        assert [answer.result().status_code for answer in answers] == [200] * 3
