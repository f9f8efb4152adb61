"""Documents whose KV is pinned, and tenants that may store so much and no more."""

from __future__ import annotations

from collections.abc import Iterator
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
def served(folder: Path, **options: object) -> Iterator[tuple[FusedKVEngine, str]]:
    with ExitStack() as entered:
        made = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
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
        engine.store.unpin(document)
        client.post(f"/v1/documents/{document}/pin")
        # Nothing is stored now, so nothing is pinned, and nothing keeps a pin.
        assert client.get(f"/v1/documents/{document}").json()["pinned"] is False
        engine.build_kv_cache(SHORT[:1], progress=False)
        assert client.post(f"/v1/documents/{document}/pin").json()["pinned"] is True
        assert ended(client, client.post(f"/v1/documents/{document}/refresh").json()["job_id"])["state"] == "done"
        assert len(engine.store.pinned([key for key in engine.corpus.keys_of(SHORT[:2]) if key])) == 2
        client.delete(f"/v1/documents/{document}")
        assert engine.store.pin_holders() == set()


def test_a_tenant_stores_no_more_than_its_quota(tmp_path: Path) -> None:
    with served(tmp_path / "sizes") as (engine, url), httpx.Client(base_url=url, timeout=60) as client:
        ingested(client, text_of(0, 1, 2))
        nbytes = engine.store.stats().tiers["disk"][1]
    quotas = {"one": {"stored_bytes": nbytes + 1000}}
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


def ended_apart(client: httpx.Client, job: str) -> dict[str, object]:
    """Wait for the end of a job of documents that a tenant's client keeps apart."""
    with httpx.Client(base_url=client.base_url, headers=client.headers, params={"tenant": "user"}) as apart:
        return ended(apart, job)


def test_a_tenant_that_has_used_up_its_quota_is_refused_at_once(tmp_path: Path) -> None:
    with served(tmp_path, quotas={"default": {"stored_bytes": 1}}) as (engine, url):
        engine.build_kv_cache(SHORT[:1], progress=False)
        with httpx.Client(base_url=url, timeout=60) as client:
            # The first one makes the library, whose KV counts; it is refused by its job.
            assert ended(client, upload(client, text_of(0, 1))["job_id"])["state"] == "failed"
            refused = client.post("/v1/documents", json={"text": text_of(2)})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
