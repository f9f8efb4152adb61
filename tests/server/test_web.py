"""The web UI's files: who gets them, with which headers, and how large they are."""

from __future__ import annotations

import gzip
import re
from importlib import resources

import httpx
import pytest
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

STATIC = resources.files("fused_kv_llm.server") / "static"
BUDGET_BYTES = 90_000


@pytest.mark.parametrize("path", ["/", "/assets/app.js", "/assets/app.css", "/assets/icon.svg"])
def test_a_file_may_load_nothing_from_elsewhere(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert "unsafe" not in str(policy)
    assert {value for name, value in policy.items() if name != "img-src"} == {"'self'", "'none'"}


def test_a_browser_that_has_the_file_does_not_load_it_again(client: httpx.Client) -> None:
    etag = client.get("/assets/app.js").headers["ETag"]
    again = client.get("/assets/app.js", headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/assets/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/assets/other.js", "/assets/..%2findex.html", "/assets/%2e%2e/index.html"])
def test_there_are_no_other_files(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_needs_no_key_and_its_data_do(engine: FusedKVEngine) -> None:
    config = ServerConfig(api_keys={"sales": "a key of sixteen"})
    with running(create_app(engine, config)) as url, httpx.Client(base_url=url) as client:
        assert client.get("/").status_code == 200
        assert client.get("/assets/app.js").status_code == 200
        assert client.get("/v1/models").status_code == 401


def test_the_page_has_no_inline_code_and_names_nothing_elsewhere() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {
        "/assets/app.js",
        "/assets/app.css",
        "/assets/icon.svg",
    }


def test_the_bundle_keeps_to_its_budget() -> None:
    names = ("index.html", "assets/app.js", "assets/app.css", "assets/icon.svg")
    packed = {name: len(gzip.compress((STATIC / name).read_bytes(), 9)) for name in names}
    assert sum(packed.values()) <= BUDGET_BYTES, packed
