"""What routes answer is in the schema, from which typed clients are made."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

# What is kept of a request is the report's own form, which docs/reports.md describes and the library's types have.
_OPEN = {
    ("get", "/v1/requests"),
    ("get", "/v1/requests/{id_}"),
    ("get", "/v1/requests/{id_}/trace"),
    ("delete", "/v1/requests/{id_}"),
    ("get", "/v1/operations"),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    options = {"preprocessing": "none", "dtype": "float32"}
    folder = tmp_path_factory.mktemp("kv")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as engine:
        return create_app(engine, ServerConfig(model_name="tiny"))


def test_every_route_says_what_it_answers(app: FastAPI) -> None:
    open_ended = set()
    for path, methods in app.openapi()["paths"].items():
        for method, about in methods.items():
            good = [answer for status, answer in about["responses"].items() if status.startswith("2")]
            schemas = [answer.get("content", {}).get("application/json", {}).get("schema") for answer in good]
            for schema in schemas:
                if schema is not None and "$ref" not in schema:
                    open_ended.add((method, path))
    assert open_ended == _OPEN
