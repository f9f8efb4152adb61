"""Documents whose KV is pinned, and tenants that may store so much and no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from server.documents import ended, ingested, text_of, upload
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import StoreFullError
from fused_kv_llm.server import ServerConfig, create_app

KEYS = {"one": "the-key-of-tenant-one", "two": "the-key-of-tenant-two"}


@contextmanager
def served(
    folder: Path, of_engine: Mapping[str, object] | None = None, /, **options: object
) -> Iterator[tuple[FusedKVEngine, str]]:
    with ExitStack() as entered:
        made = {"preprocessing": "none", "dtype": "float32", "store_misses": False, **(of_engine or {})}
        engine = entered.enter_context(
            FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **made)
        )
        config = ServerConfig(model_name="tiny", chunk_chars=300, **options)
        yield engine, entered.enter_context(running(create_app(engine, config)))


@contextmanager
def client_of(url: str, tenant: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {KEYS[tenant]}"}) as made:
        yield made


def test_pinned_documents_stay_when_others_go(tmp_path: Path) -> None:
    with served(tmp_path) as (engine, url), httpx.Client(base_url=url, timeout=60) as client:
        kept, other = ingested(client, text_of(0, 1)), ingested(client, text_of(1, 2))
        assert client.post(f"/v1/documents/{kept}/pin").json()["pinned"] is True
        with pytest.raises(StoreFullError, match="pinned"):
            engine.store.evict(0)
        stored = [chunk["stored"] for chunk in client.get(f"/v1/documents/{kept}").json()["chunks"]]
        assert stored == [True, True]
        # The chunk that both have stays for the sake of the first.
        assert [chunk["stored"] for chunk in client.get(f"/v1/documents/{other}").json()["chunks"]] == [True, False]
        assert {one["id"]: one["pinned"] for one in client.get("/v1/documents").json()["data"]} == {
            kept: True,
            other: False,
        }
        assert client.post(f"/v1/documents/{kept}/unpin").json()["pinned"] is False
        assert engine.store.evict(0) == 2
        assert client.post("/v1/documents/doc-none/pin").status_code == 404


def test_what_is_stored_again_for_a_pinned_document_is_pinned(tmp_path: Path) -> None:
    with served(tmp_path) as (engine, url), httpx.Client(base_url=url, timeout=60) as client:
        document = ingested(client, text_of(0, 1))
        client.post(f"/v1/documents/{document}/pin")
        engine.delete_chunks(SHORT[:2])
        engine.store.pins.remove(document)
        client.post(f"/v1/documents/{document}/pin")
        # Nothing is stored now, so nothing is pinned, and nothing keeps a pin.
        assert client.get(f"/v1/documents/{document}").json()["pinned"] is False
        engine.build_kv_cache(SHORT[:1], progress=False)
        assert client.post(f"/v1/documents/{document}/pin").json()["pinned"] is True
        assert ended(client, client.post(f"/v1/documents/{document}/refresh").json()["job_id"])["state"] == "done"
        assert len(engine.store.pins.of([key for key in engine.corpus.keys_of(SHORT[:2]) if key])) == 2
        client.delete(f"/v1/documents/{document}")
        assert engine.store.pins.holders() == set()


def test_a_tenant_stores_no_more_than_its_quota(tmp_path: Path) -> None:
    with served(tmp_path / "sizes") as (engine, url), httpx.Client(base_url=url, timeout=60) as client:
        ingested(client, text_of(0, 1, 2))
        nbytes = engine.store.stats().tiers["disk"][1] + len(text_of(0, 1, 2))
    # Room for a few texts more, and for no KV.
    quotas = {"one": {"stored_bytes": nbytes + 1500}}
    with served(tmp_path / "kv", api_keys=KEYS, quotas=quotas) as (_, url), ExitStack() as entered:
        one, two = (entered.enter_context(client_of(url, tenant)) for tenant in KEYS)
        first = ingested(one, text_of(0, 1, 2))
        job = ended(one, upload(one, text_of(3))["job_id"])
        assert job["state"] == "failed"
        assert "Delete documents to make room" in job["error"]
        # What a tenant's clients keep apart counts together; equal chunks of another tenant do not count.
        apart = one.post("/v1/documents", json={"text": text_of(4)}, params={"tenant": "user"})
        failed = httpx.get(
            f"{url}/v1/jobs/{apart.json()['job_id']}", params={"tenant": "user"}, headers=dict(one.headers)
        )
        assert ended_apart(one, apart.json()["job_id"])["state"] == "failed", failed.text
        ingested(two, text_of(0, 1, 2, 3))
        # Text that is stored already takes nothing more, and what is deleted makes room.
        assert ended(one, upload(one, text_of(1))["job_id"])["state"] == "done"
        for document in one.get("/v1/documents", params={"limit": 100}).json()["data"]:
            one.delete(f"/v1/documents/{document['id']}")
        assert first not in [document["id"] for document in one.get("/v1/documents").json()["data"]]
        ingested(one, text_of(3))
        metrics = one.get("/metrics").text
        assert 'fused_kv:over_quota_requests_total{quota="stored_bytes",tenant="one"} 2.0' in metrics


def test_texts_without_kv_count(tmp_path: Path) -> None:
    """Who cancels ingestion cannot fill the disk with what was uploaded."""
    quotas = {"one": {"stored_bytes": 10_000}}
    with served(tmp_path, api_keys=KEYS, quotas=quotas) as (engine, url), client_of(url, "one") as one:
        statuses = []
        # The tenant's engine is opened, which takes the model.
        assert one.get("/v1/documents").json()["data"] == []
        with engine.model_lock:
            for _ in range(4):
                made = one.post("/v1/documents", json={"text": "x " * 2000})
                statuses.append(made.status_code)
                if made.status_code == 202:
                    one.post(f"/v1/jobs/{made.json()['job_id']}/cancel")
        assert statuses == [202, 202, 429, 429]
        assert one.post("/v1/documents", json={"text": "x"}).status_code == 202


def test_pins_leave_room_for_others(tmp_path: Path) -> None:
    with served(tmp_path / "sizes") as (engine, url), httpx.Client(base_url=url, timeout=60) as client:
        ingested(client, text_of(0))
        nbytes = engine.store.stats().tiers["disk"][1]
    # Half of it for pins, of which each key has half: two chunks.
    with (
        served(tmp_path / "kv", {"disk_bytes": 9 * nbytes}, api_keys=KEYS) as (_, url),
        client_of(url, "one") as one,
        client_of(url, "two") as two,
    ):
        documents = [ingested(one, text_of(number)) for number in range(3)]
        statuses = [one.post(f"/v1/documents/{document}/pin").status_code for document in documents]
        assert statuses == [200, 200, 429]
        # What is pinned already takes no more, and what one holds is nothing to the other.
        assert one.post(f"/v1/documents/{documents[0]}/pin").status_code == 200
        mine = ingested(two, text_of(0))
        assert two.post(f"/v1/documents/{mine}/pin").status_code == 200
        one.post(f"/v1/documents/{documents[1]}/unpin")
        assert one.post(f"/v1/documents/{documents[2]}/pin").status_code == 200
        # The store takes what comes, whatever is pinned.
        for number in range(10, 20):
            ingested(two, text_of(number))


def test_a_pin_does_not_outlive_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as (engine, url), httpx.Client(base_url=url, timeout=60) as client:
        document, pin = ingested(client, text_of(0)), engine.store.pins.add

        def deleted_before(keys: Iterable[str], holder: str) -> None:
            wanted = list(keys)
            assert client.delete(f"/v1/documents/{document}").status_code == 200
            pin(wanted, holder)

        monkeypatch.setattr(engine.store.pins, "add", deleted_before)
        client.post(f"/v1/documents/{document}/pin")
        assert engine.store.pins.holders() == set()


def test_what_failed_inside_is_told_to_the_log_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path) as (engine, url), httpx.Client(base_url=url, timeout=60) as client:

        def full(*_: object, **__: object) -> None:
            raise StoreFullError(f"The disk of {tmp_path} is full")

        monkeypatch.setattr(engine, "build_kv_cache", full)
        job = ended(client, upload(client, text_of(0))["job_id"])
        assert job["state"] == "failed"
        assert str(tmp_path) not in job["error"]


def ended_apart(client: httpx.Client, job: str) -> dict[str, object]:
    """Wait for the end of a job of documents that a tenant's client keeps apart."""
    with httpx.Client(base_url=client.base_url, headers=client.headers, params={"tenant": "user"}) as apart:
        return ended(apart, job)


def test_a_tenant_that_has_used_up_its_quota_is_refused_at_once(tmp_path: Path) -> None:
    with served(tmp_path, quotas={"default": {"stored_bytes": 2000}}) as (engine, url):
        engine.build_kv_cache(SHORT[:1], progress=False)
        with httpx.Client(base_url=url, timeout=60) as client:
            # The first one, whose text has room, makes the library, whose KV counts; it is refused by its job.
            assert ended(client, upload(client, text_of(0, 1))["job_id"])["state"] == "failed"
            refused = client.post("/v1/documents", json={"text": text_of(2)})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
