"""Small random chunks with everything that ``KVStore.put`` needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from fused_kv_llm.chunk import ChunkKV, ContentHash, KVIdentity, chunk_key
from fused_kv_llm.store import KVStore, StoredKV


@dataclass(frozen=True)
class Chunk:
    """A chunk with everything ``put`` needs."""

    key: str
    identity: str
    text: str
    content: ContentHash
    kv: ChunkKV

    def put(self, store: KVStore) -> int:
        return store.put(self.key, self.identity, self.text, self.content, self.kv)

    def open(self, store: KVStore) -> StoredKV | None:
        return store.open(self.key, self.kv.token_ids)

    def path(self, kv_dir: Path) -> Path:
        return kv_dir / "chunks" / self.key[:2] / f"{self.key}.safetensors"


def build_chunk(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    layers: int = 3,
    heads: int = 2,
    tokens: int = 5,
    dim: int = 8,
    model: str = "model-a",
    tenant: str = "",
    more_text: str = "",
) -> Chunk:
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, heads, tokens, dim)
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    ids = tuple(int(i) for i in torch.randint(0, 50_000, (tokens,), generator=generator))
    identity = KVIdentity(model, "tokenizer", str(dtype), "rope", "prefix", tenant=tenant).digest
    text = f'Chunk {seed} says: naïve café, 夜间渡轮, \x00 and "quotes" \\ 🛳{more_text}'
    digest = hashlib.sha256(text.encode()).digest()
    content = ContentHash(
        int.from_bytes(digest[:8], "little") | 1 << 63, int.from_bytes(digest[8:16], "little"), len(text)
    )
    return Chunk(chunk_key(identity, ids), identity, text, content, ChunkKV(keys, values, ids, 7 + seed))
