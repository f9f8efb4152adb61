"""What a document would take is said before it is uploaded, and nothing of it is kept."""

from __future__ import annotations

import httpx
from server.documents import ingested, text_of

from fused_kv_llm import FusedKVEngine


def test_an_estimate_is_what_the_ingestion_needs(client: httpx.Client, engine: FusedKVEngine) -> None:
    text = text_of(30, 31, 32)
    before = client.get("/v1/documents").json()
    told = client.post("/v1/documents/estimate", files={"file": ("a.txt", text.encode())}).json()
    assert client.get("/v1/documents").json() == before
    id_ = ingested(client, text)
    try:
        chunks = client.get(f"/v1/documents/{id_}").json()["chunks"]
        assert told["new_chunks"] == told["chunks"] == len(chunks)
        assert told["tokens"] == sum(chunk["tokens"] for chunk in chunks)
        keys = [key for key in engine.corpus.keys_of([chunk["text"] for chunk in chunks]) if key]
        written = sum(row.nbytes for row in engine.store.rows(keys).values())
        # Files have a head too.
        assert told["kv_bytes"] <= written <= 1.2 * told["kv_bytes"] + 4096 * len(keys)
        again = client.post("/v1/documents/estimate", json={"text": text}).json()
        assert (again["new_chunks"], again["tokens"], again["kv_bytes"]) == (0, 0, 0)
    finally:
        client.delete(f"/v1/documents/{id_}")
    assert client.post("/v1/documents/estimate", files={"file": ("a.exe", b"x")}).status_code == 415
