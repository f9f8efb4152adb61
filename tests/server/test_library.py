"""The file with a tenant's documents: what it keeps when the server ends, and for whom."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from models import smollm2_tokenizer, tiny_model
from server.documents import ended, text_of, upload
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.closed_library import owner_of_expired
from fused_kv_llm.server.library import Library
from fused_kv_llm.server.library_schema import Owner
from fused_kv_llm.server.refusals import RefusedError


def test_a_job_survives_the_server(tmp_path: Path) -> None:
    """What was uploaded is in the file, so that an interrupted job needs nothing of its client."""
    config = ServerConfig(model_name="tiny", chunk_chars=300)
    options = {"preprocessing": "none", "dtype": "float32", "kv_dir": tmp_path, "tokenizer": smollm2_tokenizer()}
    with FusedKVEngine(tiny_model(), **options) as engine:
        with running(create_app(engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:
            with engine.model_lock:
                made = upload(client, text_of(*range(9)), name="kept")
                job = f"/v1/jobs/{made['job_id']}"
                wait_until(lambda: client.get(job).json()["state"] == "prefilling")
                second = upload(client, text_of(10))
                # A server that is killed writes nothing more.
                file = next(iter((tmp_path / "documents").glob("*.sqlite")))
                log = file.with_name(file.name + "-wal")
                kept = file.read_bytes(), log.read_bytes()
            ended(client, second["job_id"])
        file.write_bytes(kept[0])
        log.write_bytes(kept[1])
        with running(create_app(engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:
            for one in (made, second):
                assert client.get(f"/v1/jobs/{one['job_id']}").json()["state"] == "interrupted"
                assert client.get(f"/v1/documents/{one['id']}").json()["ready"] is False
                assert client.post(f"/v1/jobs/{one['job_id']}/resume").status_code == 202
                assert ended(client, one["job_id"])["state"] == "done"
            assert len(client.get(f"/v1/documents/{made['id']}").json()["chunks"]) == 9


def test_one_process_at_a_time(tmp_path: Path) -> None:
    library = Library(tmp_path / "a.sqlite")
    with pytest.raises(RefusedError) as caught:
        Library(tmp_path / "a.sqlite")
    assert caught.value.status == 503
    library.close()
    Library(tmp_path / "a.sqlite").close()


def test_whose_documents_have_expired_can_be_seen_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    library = Library(path, lambda: 100.0)
    library.about(Owner("one", "user"))
    library.add("", ".txt", b"text", "{}", 200.0)
    assert owner_of_expired(path, 199.0) is None
    assert owner_of_expired(path, 200.0) == ("one", "user")
    library.close()


def test_only_what_is_ready_and_has_not_expired_can_be_retrieved(tmp_path: Path) -> None:
    now_s = 100.0
    library = Library(tmp_path / "a.sqlite", lambda: now_s)
    ids = [library.add("", ".txt", b"", "{}", expires_s)[0] for expires_s in (None, 200.0, 150.0, None)]
    for number, id_ in enumerate(ids):
        library.put_chunks(id_, [f"text {number}"])
    before = library.version
    for id_ in ids[:3]:
        library.put_vectors(id_, np.ones((1, 2), np.float32))
    assert library.version > before
    rows, until_s = library.retrievable()
    assert ([row[3] for row in rows], until_s) == (["text 0", "text 1", "text 2"], 150.0)
    now_s = 150.0
    rows, until_s = library.retrievable()
    assert ([row[3] for row in rows], until_s) == (["text 0", "text 1"], 200.0)
    assert library.expired() == [ids[2]]
    assert library.remove(ids[2]) == ["text 2"]
    assert library.remove(ids[2]) is None
    library.close()
