"""Two replicas on Ray Serve over one store: equal answers, requests where their chunks are, and one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from ray_cluster import replica_pids, serving
from server.running import events
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.scale import build_app
from fused_kv_llm.scale.options import ServingOptions

pytest.importorskip("ray")
# Ray's own warnings, when it is imported and when it ends, are no concern of these tests.
pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    tiny_model().save_pretrained(folder / "model")
    smollm2_tokenizer().save_pretrained(folder / "model")
    made = {"model": str(folder / "model"), "kv_dir": str(folder / "kv"), "preprocessing": "none", "dtype": "float32",
            "store_misses": False, "prefix_cache_bytes": 0}  # fmt: skip
    with FusedKVEngine(**made) as engine:
        engine.build_kv_cache(SHORT[:16], progress=False)
    return made


@pytest.fixture(scope="module")
def url(options: dict[str, Any]) -> Iterator[str]:
    args = {"engine": options, "server": {"model_name": "tiny"}, "replicas": 2, "replica_cpus": 0.5,
            "stats_period_s": 0.3, "catalog_period_s": 1.0}  # fmt: skip
    with serving(args) as found:
        yield found


def body(first: int, count: int = 2, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": rag_prompt(SHORT[first : first + count])}]
    return {"model": "tiny", "max_tokens": 8, "temperature": 0, "messages": messages, **more}


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_answers_are_those_of_one_engine(url: str, options: dict[str, Any]) -> None:
    with FusedKVEngine(**options) as engine:
        want = [
            engine.generate([{"role": "user", "content": rag_prompt(SHORT[n : n + 2])}], max_tokens=8, temperature=0)
            for n in range(6)
        ]
    got = [httpx.post(f"{url}/v1/chat/completions", json=body(n), timeout=60) for n in range(6)]
    assert [text_of(one) for one in got] == [one.text for one in want]
    assert all(one.json()["fused_kv"]["chunks_found"] == 2 for one in got)


def test_chunks_are_read_from_the_disk_once(url: str) -> None:
    """With eight questions asked three times in turns, random routing would read most of them twice."""
    tiers = [
        httpx.post(f"{url}/v1/chat/completions", json=body(n, 1), timeout=60).json()["fused_kv"]["bytes_loaded"]
        for _ in range(3)
        for n in range(8, 16)
    ]
    assert [list(one) for one in tiers] == [["disk"]] * 8 + [["memory"]] * 16


def test_a_killed_replica_costs_only_answers_that_had_begun(url: str) -> None:
    """Eight users ask ten questions each; a replica is killed when ten are answered."""
    kinds: list[str] = []

    async def user(client: httpx.AsyncClient, number: int, *, stream: bool) -> None:
        for _ in range(10):
            response = await client.post("/v1/chat/completions", json=body(number % 14, max_tokens=60, stream=stream))
            assert response.status_code == 200, response.text
            if stream:
                last = events(response.text)[-1]
                kinds.append(last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"])
            else:
                kinds.append(response.json()["choices"][0]["finish_reason"])

    async def load() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            users = [asyncio.create_task(user(client, n, stream=n % 2 == 0)) for n in range(8)]
            while len(kinds) < 10:
                await asyncio.sleep(0.05)
            os.kill(replica_pids()[0], signal.SIGKILL)
            await asyncio.gather(*users)

    asyncio.run(load())
    assert len(kinds) == 80
    assert set(kinds) <= {"length", "stop", "replica_lost"}
    assert kinds.count("replica_lost") <= 4
    # Ray puts another replica in its place.
    wait_until(lambda: len(replica_pids()) == 2, timeout_s=120)


def test_wrong_options_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_replicas=1 is less than replicas=2"):
        build_app({"replicas": 2, "max_replicas": 1})
    with pytest.raises(ConfigError, match="prot"):
        build_app({"server": {"prot": 8000}})


def test_scaling_is_asked_for_only_when_it_may_happen() -> None:
    fixed, scaled = build_app({"replicas": 2}), build_app({"replicas": 1, "max_replicas": 4, "target_requests": 3})
    replicas = [one._bound_deployment.init_args[0]._bound_deployment for one in (fixed, scaled)]
    assert replicas[0].num_replicas == 2
    scaling = replicas[1]._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 4, 3)


def test_every_option_says_what_it_is() -> None:
    assert all(field.description for field in ServingOptions.model_fields.values())
