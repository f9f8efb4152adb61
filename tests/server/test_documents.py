"""Documents: uploaded, ingested, listed, retrieved and deleted, each tenant's apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import SHORT
from fastapi import FastAPI
from models import smollm2_tokenizer, tiny_model
from server.documents import ended, ingested, retrieve, text_of, upload
from server.pdfs import bomb
from server.running import events, running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.offline import first_passes_of
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.libraries import Owner

KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    folder = tmp_path_factory.mktemp("documents")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as made:
        yield made


@pytest.fixture(scope="module")
def app(own_engine: FusedKVEngine) -> FastAPI:
    config = ServerConfig(model_name="tiny", api_keys=KEYS, chunk_chars=300, sweep_s=0.2, max_answer_tokens=16)
    return create_app(own_engine, config)


@pytest.fixture(scope="module")
def own_url(app: FastAPI) -> Iterator[str]:
    with running(app) as found:
        yield found


@pytest.fixture
def one(own_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_url, timeout=60, headers={"authorization": f"Bearer {KEYS['one']}"}) as made:
        yield made
        for document in made.get("/v1/documents", params={"limit": 100}).json()["data"]:
            made.delete(f"/v1/documents/{document['id']}")


@pytest.fixture
def two(own_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=own_url, timeout=60, headers={"authorization": f"Bearer {KEYS['two']}"}) as made:
        yield made


def test_an_upload_is_ingested_by_a_job(one: httpx.Client) -> None:
    made = upload(one, text_of(0, 1, 2), name="Fleet", metadata={"year": 2024, "tags": ["ü"]})
    job = ended(one, made["job_id"])
    assert (job["state"], job["document_id"], job["error"]) == ("done", made["id"], None)
    assert job["done"] == job["total"] == 3
    found = one.get(f"/v1/documents/{made['id']}").json()
    assert (found["name"], found["metadata"], found["ready"]) == ("Fleet", {"year": 2024, "tags": ["ü"]}, True)
    assert [chunk["text"] for chunk in found["chunks"]] == SHORT[:3]
    assert all(chunk["stored"] and chunk["tokens"] > 10 and chunk["bytes"] > 1000 for chunk in found["chunks"])
    assert found["tokens"] == sum(chunk["tokens"] for chunk in found["chunks"])
    assert found["stored_bytes"] == sum(chunk["bytes"] for chunk in found["chunks"])
    told = events(one.get(f"/v1/jobs/{made['job_id']}/events").text)
    assert [event["state"] for event in told] == ["done"]


def test_a_job_tells_its_steps(one: httpx.Client, own_engine: FusedKVEngine) -> None:
    with ExitStack() as entered:
        with own_engine.model_lock:
            job = upload(one, text_of(*range(20)))["job_id"]
            wait_until(lambda: one.get(f"/v1/jobs/{job}").json()["state"] == "prefilling")
            lines = entered.enter_context(one.stream("GET", f"/v1/jobs/{job}/events")).iter_text()
            text = next(lines)
        told = events(text + "".join(lines))
    steps = [(told[at]["state"], told[at]["done"], told[at]["total"]) for at in (0, -1)]
    assert steps == [("prefilling", 0, 20), ("done", 20, 20)]


def test_preprocessing_does_not_go_on_between_the_batches_of_a_job(
    one: httpx.Client, own_engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, found, real = first_passes_of(own_engine.model), list[bool](), FusedKVEngine.build_kv_cache

    def noting(engine: FusedKVEngine, *arguments: Any, **options: Any) -> Any:
        found.append(passes.are_under_way)
        report = real(engine, *arguments, **options)
        found.append(passes.are_under_way)
        return report

    monkeypatch.setattr(FusedKVEngine, "build_kv_cache", noting)
    ingested(one, text_of(*range(20)))
    assert len(found) > 2
    assert all(found)
    assert not passes.are_under_way


def test_lists_have_pages(one: httpx.Client) -> None:
    ids = [ingested(one, f"{SHORT[number]} {number}") for number in range(3)]
    first = one.get("/v1/documents", params={"limit": 2}).json()
    assert ([found["id"] for found in first["data"]], first["has_more"]) == (ids[:2], True)
    rest = one.get("/v1/documents", params={"limit": 2, "after": first["last_id"]}).json()
    assert ([found["id"] for found in rest["data"]], rest["has_more"]) == (ids[2:], False)
    jobs = one.get("/v1/jobs", params={"limit": 100}).json()["data"]
    assert [job["document_id"] for job in jobs][-3:] == ids


def test_documents_are_found_by_their_names(one: httpx.Client) -> None:
    ids = {name: ingested(one, f"{SHORT[7]} {name}", name=name) for name in ("Überfahrt.txt", "100%_ferry", "ferry")}

    def found(search: str) -> list[str]:
        return [one["name"] for one in pages(search)]

    def pages(search: str) -> list[dict[str, Any]]:
        return one.get("/v1/documents", params={"search": search, "limit": 100}).json()["data"]

    assert found("überFAHRT") == ["Überfahrt.txt"]
    # Nothing of it is a wildcard.
    assert found("100%_") == ["100%_ferry"]
    assert found("1%y") == []
    assert found("FERRY") == ["100%_ferry", "ferry"]
    assert found(ids["ferry"][:20]) == ["ferry"]


def test_deleting_takes_the_kv_that_nobody_else_has(one: httpx.Client, app: FastAPI) -> None:
    first, second = ingested(one, text_of(3, 4)), ingested(one, text_of(4, 5))
    with app.state.fused_kv.tenants.using("one") as engine:
        assert None not in map(engine.chunk_id, SHORT[3:6])
        assert one.delete(f"/v1/documents/{first}").json()["deleted"]
        assert [engine.chunk_id(text) is None for text in SHORT[3:6]] == [True, False, False]
    assert one.get(f"/v1/documents/{first}").status_code == one.delete(f"/v1/documents/{first}").status_code == 404
    assert all(chunk["stored"] for chunk in one.get(f"/v1/documents/{second}").json()["chunks"])


def test_a_document_that_is_deleted_while_it_is_ingested_leaves_nothing(
    one: httpx.Client, app: FastAPI, own_engine: FusedKVEngine
) -> None:
    with app.state.fused_kv.tenants.using("one") as engine:
        with own_engine.model_lock:
            made = upload(one, text_of(*range(20, 30)))
            wait_until(lambda: one.get(f"/v1/jobs/{made['job_id']}").json()["state"] == "prefilling")
            one.delete(f"/v1/documents/{made['id']}")
        assert ended(one, made["job_id"])["state"] == "cancelled"
        # The job that comes next begins when that one has been left.
        ingested(one, SHORT[30])
        assert set(map(engine.chunk_id, SHORT[20:30])) == {None}


def test_a_cancelled_job_is_resumed(one: httpx.Client, own_engine: FusedKVEngine) -> None:
    with own_engine.model_lock:
        made = upload(one, text_of(*range(20)))
        job = f"/v1/jobs/{made['job_id']}"
        wait_until(lambda: one.get(job).json()["state"] == "prefilling")
        assert one.post(f"{job}/resume").status_code == 409
        assert one.post(f"{job}/cancel").json()["state"] == "cancelled"
        assert one.post(f"{job}/cancel").status_code == 409
    assert not one.get(f"/v1/documents/{made['id']}").json()["ready"]
    assert retrieve(one, SHORT[0]).status_code == 400
    assert one.post(f"{job}/resume").status_code == 202
    assert ended(one, made["job_id"])["state"] == "done"
    assert one.get(f"/v1/documents/{made['id']}").json()["ready"]


def test_no_documents_are_kept_in_the_clear_beside_an_encrypted_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("FUSED_KV_ENCRYPTION_KEY", "ab" * 32)
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as made:
        # The variable may be gone by the time that somebody asks.
        monkeypatch.delenv("FUSED_KV_ENCRYPTION_KEY")
        with running(create_app(made, ServerConfig(model_name="tiny"))) as url:
            response = httpx.post(f"{url}/v1/documents", json={"text": SHORT[0]}, timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (501, "not_supported")
    assert all(SHORT[0].encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_chunks_say_where_they_are_and_how_they_are_used(one: httpx.Client, app: FastAPI) -> None:
    document = f"/v1/documents/{ingested(one, text_of(9, 10))}"
    with app.state.fused_kv.tenants.using("one") as engine:
        engine.store.drop_memory()
        chunks = one.get(document).json()["chunks"]
        assert [(chunk["tier"], chunk["uses"], chunk["last_used_at"]) for chunk in chunks] == [("disk", 0, None)] * 2
        assert one.post(f"{document}/warm").json()["loading"] == 2
        wait_until(lambda: {chunk["tier"] for chunk in one.get(document).json()["chunks"]} == {"memory"})
        engine.clear_prefix_cache()
        assert retrieve(one, SHORT[9], k=1).status_code == 200
        used, unused = one.get(document).json()["chunks"]
        assert used["uses"] >= 1
        assert unused["uses"] == 0
        assert abs(used["last_used_at"] - time.time()) < 60
        engine.delete_chunks(SHORT[9:11])
        lost = one.get(document).json()["chunks"]
        assert [(chunk["stored"], chunk["tier"]) for chunk in lost] == [(False, None)] * 2
        assert one.post(f"{document}/warm").json() == {"id": document[14:], "loading": 0, "not_stored": 2}
        refreshed = one.post(f"{document}/refresh")
        assert refreshed.status_code == 202
        assert ended(one, refreshed.json()["job_id"])["state"] == "done"
        assert all(chunk["stored"] for chunk in one.get(document).json()["chunks"])


def test_what_is_not_ingested_is_not_refreshed(one: httpx.Client, own_engine: FusedKVEngine) -> None:
    with own_engine.model_lock:
        made = upload(one, text_of(11))
        assert one.post(f"/v1/documents/{made['id']}/refresh").status_code == 409
    ended(one, made["job_id"])


def test_the_time_to_live_can_be_changed(one: httpx.Client) -> None:
    document = f"/v1/documents/{ingested(one, SHORT[12])}"
    for expires_at in (int(time.time()) + 3600, None):
        assert one.patch(document, json={"expires_at": expires_at}).json()["expires_at"] == expires_at
        assert one.get(document).json()["expires_at"] == expires_at
    assert one.patch(document, json={}).status_code == 400
    assert one.patch(document, json={"expires_at": time.time() + 0.2}).status_code == 200
    wait_until(lambda: one.get(document).status_code == 404)


def test_expired_documents_are_gone_at_once_and_swept(
    one: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = ingested(one, SHORT[8], expires_at=time.time() + 3600)
    assert retrieve(one, SHORT[8], k=1).status_code == 200
    with app.state.fused_kv.documents.open(Owner("one", None)) as opened:
        assert opened.engine.chunk_id(SHORT[8]) is not None
        monkeypatch.setattr(opened.library, "_clock", lambda: time.time() + 3601)
        assert retrieve(one, SHORT[8], k=1).json()["error"]["code"] == "no_documents"
        assert one.get(f"/v1/documents/{gone}").status_code == 404
        monkeypatch.setattr(app.state.fused_kv.documents.libraries, "_clock", lambda: time.time() + 3601)
        wait_until(lambda: opened.engine.chunk_id(SHORT[8]) is None)
        assert opened.library.chunks(gone) == []


def test_a_conversation_is_answered_from_documents(one: httpx.Client) -> None:
    document = ingested(one, text_of(*range(6)), name="Handbook")
    response = retrieve(one, SHORT[4][:80], k=3)
    assert response.status_code == 200, response.text
    report = response.json()["fused_kv"]
    best, *others = report["retrieved"]
    assert (best["document_id"], best["name"], best["chunk"]) == (document, "Handbook", 4)
    assert len(others) == 2
    assert best["score"] > max(other["score"] for other in others)
    # The chunks stand in the prompt such that their KV is used.
    assert (report["chunks_found"], report["chunks_missed"]) == (3, 0)
    assert report["reused_tokens"] > 50
    streamed = events(retrieve(one, SHORT[4][:80], k=1, stream=True).text)
    assert streamed[-1]["fused_kv"]["retrieved"] == [best]


def test_without_documents_there_is_nothing_to_retrieve(two: httpx.Client) -> None:
    response = retrieve(two, "Which ships?")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_documents")
    asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}]
    assert retrieve(two, "", messages=asked).status_code == 400
    completion = {"model": "tiny", "prompt": "Hello", "fused_kv": {"retrieve": {}}}
    assert two.post("/v1/completions", json=completion).status_code == 400


def test_deleted_documents_are_not_retrieved(one: httpx.Client) -> None:
    kept, gone = ingested(one, SHORT[6]), ingested(one, SHORT[7])
    assert retrieve(one, SHORT[7], k=1).json()["fused_kv"]["retrieved"][0]["document_id"] == gone
    one.delete(f"/v1/documents/{gone}")
    found = retrieve(one, SHORT[7], k=2).json()["fused_kv"]["retrieved"]
    assert [chunk["document_id"] for chunk in found] == [kept]


def test_nothing_crosses_between_tenants(one: httpx.Client, two: httpx.Client) -> None:
    made = upload(one, text_of(0, 1))
    ended(one, made["job_id"])
    for client, params in ((two, {}), (one, {"tenant": "user"}), (two, {"tenant": "one"})):
        assert client.get("/v1/documents", params=params).json()["data"] == []
        assert client.get("/v1/jobs", params=params).json()["data"] == []
        for path in (f"/v1/documents/{made['id']}", f"/v1/jobs/{made['job_id']}", f"/v1/jobs/{made['job_id']}/events"):
            assert client.get(path, params=params).status_code == 404
        assert client.delete(f"/v1/documents/{made['id']}", params=params).status_code == 404
        for what in ("warm", "refresh"):
            assert client.post(f"/v1/documents/{made['id']}/{what}", params=params).status_code == 404
        lifetime = {"expires_at": 1.0}
        assert client.patch(f"/v1/documents/{made['id']}", params=params, json=lifetime).status_code == 404
        for what in ("cancel", "resume"):
            assert client.post(f"/v1/jobs/{made['job_id']}/{what}", params=params).status_code == 404
    assert retrieve(two, SHORT[0]).json()["error"]["code"] == "no_documents"
    assert retrieve(one, SHORT[0], fused_kv={"retrieve": {}, "tenant": "user"}).status_code == 400
    assert retrieve(one, SHORT[0]).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": "x", "path": "/etc/passwd"}, "path"),
        ({"text": "x", "metadata": []}, "metadata"),
        ({"text": "x", "name": "n" * 300}, "name"),
        ({"text": "x", "expires_at": -1}, "expires_at"),
        ({"text": "x", "expires_at": 1000}, "expires_at"),
    ],
)
def test_uploads_that_are_none(one: httpx.Client, body: dict[str, object], param: str) -> None:
    response = one.post("/v1/documents", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert one.get("/v1/documents").json()["data"] == []


def test_files_are_uploaded_as_forms(one: httpx.Client) -> None:
    page = f"<h1>Fleet</h1><script>no()</script><p>{SHORT[0]}</p>".encode()
    form = {"metadata": '{"year": 2024}', "expires_at": str(time.time() + 3600)}
    response = one.post("/v1/documents", files={"file": ("../../etc/Fleet.HTML", page)}, data=form)
    assert response.status_code == 202, response.text
    made = response.json()
    assert ended(one, made["job_id"])["state"] == "done"
    found = one.get(f"/v1/documents/{made['id']}").json()
    assert (found["name"], found["type"], found["metadata"]) == ("Fleet.HTML", "html", {"year": 2024})
    assert [chunk["text"] for chunk in found["chunks"]] == [f"Fleet\n\n{SHORT[0]}"]


@pytest.mark.parametrize(
    ("options", "status", "param"),
    [
        ({"files": {"file": ("a.exe", b"MZ")}}, 415, "file"),
        ({"files": {"file": ("html", b"x")}}, 415, "file"),
        ({"files": {"other": ("a.txt", b"x")}}, 400, "file"),
        ({"files": {"file": ("a.txt", b"x")}, "data": {"metadata": "[1"}}, 400, "metadata"),
        ({"files": {"file": ("a.txt", b"x")}, "data": {"metadata": "[" * 50_000}}, 400, "metadata"),
        ({"files": {"file": ("a.txt", b"x")}, "data": {"path": "/etc"}}, 400, "path"),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, None),
        ({"content": b"[" * 100_000, "headers": {"content-type": "application/json"}}, 400, None),
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, None),
    ],
)
def test_forms_that_are_none(one: httpx.Client, options: dict[str, Any], status: int, param: str | None) -> None:
    response = one.post("/v1/documents", **options)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_a_document_that_cannot_be_read_fails_its_job_and_no_other(one: httpx.Client) -> None:
    response = one.post("/v1/documents", files={"file": ("bomb.pdf", bomb(100_000_000))})
    others = upload(one, SHORT[0])
    job = ended(one, response.json()["job_id"])
    assert (job["state"], "PDF" in job["error"] or "memory" in job["error"]) == ("failed", True), job
    assert ended(one, others["job_id"])["state"] == "done"
    assert not one.get(f"/v1/documents/{response.json()['id']}").json()["ready"]
