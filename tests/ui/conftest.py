"""Debian's Chromium before a server with SmolLM2 and three files of the handbook; `make test-ui` runs these tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.documents import ended
from server.running import running

from fused_kv_llm.demo import handbook_folder

if not os.environ.get("FUSED_KV_UI"):
    # They need a browser, so they are not among the tests of every day.
    collect_ignore_glob = ["test_*.py"]

HANDBOOK = ("01-fleet.txt", "03-fares.txt", "12-history.txt")
WAIT_MS = 20_000
QUESTION = "How many passengers can the Aldebaran carry?"


@pytest.fixture(scope="session")
def ui_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from fused_kv_llm import FusedKVEngine

    folder = tmp_path_factory.mktemp("ui")
    with FusedKVEngine("smollm2-135m", kv_dir=folder, preprocessing="none", store_misses=False) as made:
        yield made


@pytest.fixture(scope="session")
def ui_url(ui_engine: Any) -> Iterator[str]:
    """The server's address; the files of HANDBOOK are ingested."""
    from fused_kv_llm.server import ServerConfig, create_app

    with running(create_app(ui_engine, ServerConfig(max_answer_tokens=128, questions=(QUESTION,)))) as url:
        with httpx.Client(base_url=url, timeout=120) as client:
            for name in HANDBOOK:
                content = (handbook_folder() / name).read_bytes()
                made = client.post("/v1/documents", files={"file": (name, content)}).raise_for_status().json()
                assert ended(client, made["job_id"])["state"] == "done"
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import expect, sync_playwright

    # As long as a page's own: the machine may be busy.
    expect.set_options(timeout=WAIT_MS)
    found = shutil.which("chromium") or pytest.fail("There is no chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any, ui_url: str) -> Iterator[Any]:
    """Open a view, ``open_page("#/chat", width=360, dark=True)``.

    ``about:blank`` opens a page whose requests are to be changed first. No page may ask another machine, print an error
    to its console, or throw; at the end of the test it is checked that none did. ``expected_errors`` (a list of the
    page) holds parts of messages that a test means to provoke.
    """
    opened: list[tuple[Any, list[str], list[str]]] = []

    def open_(path: str = "#/chat", *, width: int = 1440, height: int = 900, dark: bool = False, **more: Any) -> Any:
        options = {"color_scheme": "dark" if dark else "light", "reduced_motion": "reduce", **more}
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        page = context.new_page()
        asked: list[str] = []
        wrong: list[str] = []
        page.expected_errors, page.ui_url, page.choosers = [], ui_url, []
        # From the beginning: of a dialog that opens while the browser is only being asked, nobody is told.
        page.on("filechooser", lambda chooser: page.choosers.append(chooser))  # noqa: PLW0108 - no builtins
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.set_default_timeout(WAIT_MS)
        page.goto(path if path == "about:blank" else f"{ui_url}/{path}")
        opened.append((page, asked, wrong))
        return page

    yield open_
    for page, asked, wrong in opened:
        expected = page.expected_errors
        page.context.close()
        elsewhere = [url for url in asked if not url.startswith((ui_url, "data:", "blob:"))]
        assert not elsewhere
        assert [one for one in wrong if not any(part in one for part in expected)] == []


@pytest.fixture(scope="session")
def axe_source() -> str:
    path = Path(__file__).parents[2] / "web/node_modules/axe-core/axe.min.js"
    if not path.exists():
        pytest.fail("axe-core is missing: make web installs it")
    return path.read_text()
