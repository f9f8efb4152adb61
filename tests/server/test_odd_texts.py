"""Texts that JSON can say and nothing else can, and names without end: refused, or kept as well as they can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from models import smollm2_tokenizer, tiny_model
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

HALF = "\\ud800"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    options: dict[str, Any] = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    folder: Path = tmp_path_factory.mktemp("kv")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as engine:
        app = create_app(engine, ServerConfig(model_name="tiny"))
        with running(app) as url, httpx.Client(base_url=url, timeout=60) as made:
            yield made


def test_half_a_surrogate_pair_in_the_metadata_of_a_form(client: httpx.Client) -> None:
    form = {"metadata": f'{{"a": "{HALF}"}}'}
    for path in ("/v1/documents", "/v1/documents/estimate"):
        refused = client.post(path, files={"file": ("a.txt", b"text")}, data=form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")


def test_half_a_surrogate_pair_in_a_tool_is_kept_of_the_request(client: httpx.Client) -> None:
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"title": "{HALF}"}}}}}}'
    body = f'{{"model": "tiny", "max_tokens": 1, "messages": [{{"role": "user", "content": "a"}}], "tools": [{tool}]}}'
    headers = {"content-type": "application/json", "x-request-id": "odd"}
    assert client.post("/v1/chat/completions", content=body, headers=headers).status_code < 500
    wait_until(lambda: client.get("/v1/requests/odd").status_code != 404)
    assert client.get("/v1/requests/odd").status_code == 200


@pytest.mark.parametrize("wrong", [{"model": "m" * 10_000}, {"fused_kv": {"selector": "s" * 10_000}}])
def test_names_without_end_are_refused_in_few_words(client: httpx.Client, wrong: dict[str, Any]) -> None:
    body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **wrong}
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert len(refused.text) < 1000
