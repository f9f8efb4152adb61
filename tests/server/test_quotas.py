"""Quotas hold for the tenant that has them, at once and from threads, and for nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.quotas import Quota, Quotas
from fused_kv_llm.server.refusals import RefusedError

KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}


def admitted(quotas: Quotas, tenant: str = "one") -> bool:
    try:
        quotas.admit(tenant)
    except RefusedError:
        return False
    return True


@pytest.mark.parametrize("quota", [{"requests_per_minute": 2}, {"tokens_per_minute": 10}])
def test_a_tenant_over_its_quota_is_refused_and_others_are_answered(
    engine: FusedKVEngine, quota: dict[str, int]
) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    config = ServerConfig(model_name="tiny", api_keys=KEYS, quotas={"one": quota})
    with running(create_app(engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:

        def ask(tenant: str) -> httpx.Response:
            headers = {"authorization": f"Bearer {KEYS[tenant]}"}
            return client.post("/v1/chat/completions", json=body, headers=headers)

        answers = [ask("one") for _ in range(3)]
        assert answers[0].status_code == 200
        assert answers[-1].status_code == 429
        assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert [ask("two").status_code for _ in range(3)] == [200] * 3
        refused = sum(answer.status_code == 429 for answer in answers)
        text = client.get("/metrics", headers={"authorization": f"Bearer {KEYS['two']}"}).text
    what = next(iter(quota)).partition("_")[0]
    assert f'fused_kv:over_quota_requests_total{{quota="{what}",tenant="one"}} {refused}.0' in text


def test_what_a_client_leaves_counts_as_far_as_it_came(engine: FusedKVEngine) -> None:
    """Nobody gets answers for nothing by leaving before their end."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1800, "stream": True}
    config = ServerConfig(model_name="tiny", quotas={"default": {"tokens_per_minute": 10}})
    with running(create_app(engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            next(line for line in response.iter_lines() if '"content":' in line)
        wait_until(lambda: client.get("/v1/operations").json()["open"] == 0)
        assert client.post("/v1/chat/completions", json=body | {"max_tokens": 1}).status_code == 429


def test_what_was_spent_comes_back_with_time() -> None:
    now_s = 0.0
    quotas = Quotas({"one": Quota(requests_per_minute=6, tokens_per_minute=60)}, lambda *_: None, lambda: now_s)
    assert [admitted(quotas) for _ in range(7)] == [True] * 6 + [False]
    now_s = 9.0
    assert not admitted(quotas)
    now_s = 10.0
    assert admitted(quotas)
    now_s = 3600.0
    quotas.spend("one", 90)
    with pytest.raises(RefusedError) as caught:
        quotas.admit("one")
    assert caught.value.retry_after_s == 31
    now_s += 31
    # No request was counted for the one that was refused, and no more than a minute's were saved up.
    assert [admitted(quotas) for _ in range(2)] == [True, True]


def test_threads_do_not_get_more_than_the_quota() -> None:
    refused: list[tuple[str, str]] = []
    quotas = Quotas(
        {"one": Quota(requests_per_minute=100)}, lambda tenant, what: refused.append((tenant, what)), lambda: 0.0
    )
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: admitted(quotas), range(400)))
    assert (sum(found), len(refused)) == (100, 300)


def test_without_keys_everybody_is_the_default_tenant() -> None:
    quotas = Quotas({"default": Quota(requests_per_minute=1)}, lambda *_: None, lambda: 0.0)
    assert [admitted(quotas, "") for _ in range(2)] == [True, False]


def test_quotas_of_nobody_are_refused() -> None:
    with pytest.raises(ConfigError, match="no keys of these tenants"):
        ServerConfig(api_keys=KEYS, quotas={"three": Quota(requests_per_minute=1)})
    with pytest.raises(ConfigError, match="requests_per_minute"):
        ServerConfig(quotas={"default": {"requests_per_minute": 0}})
