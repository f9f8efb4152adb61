"""Files that a server has as documents from its beginning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from server.running import running
from typer.testing import CliRunner
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app as command_line
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.samples import add_files


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    """Another server of this process may have the documents of the one that tests share open."""
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path / "kv", **options) as made:
        yield made


def test_files_are_ingested_once_and_those_that_were_interrupted_again(
    own_engine: FusedKVEngine, tmp_path: Path
) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path, text in zip(paths, SHORT[:2], strict=True):
        path.write_text(text)
    app = create_app(own_engine, ServerConfig(model_name="tiny"))
    desk = app.state.fused_kv.documents
    with running(app) as url, httpx.Client(base_url=url) as client:

        def found() -> dict[str, dict[str, Any]]:
            return {one["name"]: one for one in client.get("/v1/documents").json()["data"]}

        with own_engine.model_lock:
            assert add_files(desk, paths) == 2
            (job,) = [
                one for one in client.get("/v1/jobs").json()["data"] if one["document_id"] == found()["b.txt"]["id"]
            ]
            client.post(f"/v1/jobs/{job['id']}/cancel").raise_for_status()
        wait_until(lambda: found()["a.txt"]["ready"])
        assert not found()["b.txt"]["ready"]
        assert add_files(desk, paths) == 1
        wait_until(lambda: found()["b.txt"]["ready"])
        assert add_files(desk, paths) == 0
        for one in found().values():
            client.delete(f"/v1/documents/{one['id']}")


def test_the_demo_serves_the_handbook_with_prepared_questions(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: dict[str, Any] = {}

    class Loaded:
        choice = "tiny"

        def __init__(self, model: str, **options: Any) -> None:
            served.update(options, model=model)

        def __enter__(self) -> FusedKVEngine:
            return engine

        def __exit__(self, *_: object) -> None:
            pass

    def serve(_: FusedKVEngine, config: ServerConfig, **more: Any) -> None:
        served.update(more, config=config)
        more["on_started"]("http://127.0.0.1:1/")

    monkeypatch.setattr("fused_kv_llm.engine.FusedKVEngine", Loaded)
    monkeypatch.setattr("fused_kv_llm.server.serve", serve)
    ran = CliRunner().invoke(command_line, ["demo", "--web", "--port", "0", "--kv-dir", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "Open http://127.0.0.1:1/ in a browser" in ran.output
    assert len(served["config"].questions) == 3
    assert len(served["documents"]) == 12
