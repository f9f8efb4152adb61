"""A chunk's KV from its file into a request's cache, by the way that requests take; used by store.py.

The chunk is opened, its layers are read and verified in an engine's groups, and each layer is placed in the cache with
its keys rotated (``ChunkFeed`` and ``ChunkSink``), all in one thread. It is measured in five states: the first read of
a file and later ones without the memory tier; later ones whose chunk the memory tier keeps afterwards; chunks that the
memory tier holds; and ``readinto`` of the same file into memory that is there, which neither verifies nor places.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fused_kv_llm.chunk import ChunkKV, chunk_key
from fused_kv_llm.demo import drop_page_cache
from fused_kv_llm.kv import ChunkSink, PlacedChunk
from fused_kv_llm.model import CachePool, FusedCache, Geometry, Rotation
from fused_kv_llm.online.chunk_feed import ChunkFeed
from fused_kv_llm.online.read_ahead import layer_groups
from fused_kv_llm.prompt import Segment
from fused_kv_llm.prompt.texthash import content_hash
from fused_kv_llm.store import KVStore

__all__ = ["IDENTITY", "SMALL", "Loads", "Shape", "chunk_of", "loads_by_shape", "median_ms", "text_of", "timed"]

TOKENS = 512
# Where the chunk stands in the prompt: its keys are rotated.
START = 700
IDENTITY = "0" * 64


class Shape(NamedTuple):
    """What a chunk's keys and values of 512 tokens are."""

    layers: int
    kv_heads: int
    head_dim: int


SMALL = Shape(30, 3, 64)
SHAPES = {"smollm2-135m": SMALL, "qwen2.5-7b": Shape(28, 4, 128)}


def text_of(number: int) -> str:
    """Return a text of 128 characters."""
    return f"Chunk {number} of many: {hashlib.sha256(str(number).encode()).hexdigest()}".ljust(128, ".")


def chunk_of(number: int, shape: Shape = SMALL) -> tuple[str, str, ChunkKV]:
    """Return key, text and random KV of a chunk."""
    generator, (layers, heads, dim) = torch.Generator().manual_seed(number), shape
    keys, values = torch.randn((2, layers, heads, TOKENS, dim), generator=generator).to(torch.bfloat16)
    ids = tuple(range(number, number + TOKENS))
    return chunk_key(IDENTITY, ids), text_of(number), ChunkKV(keys, values, ids, 0)


def median_ms(seconds: list[float]) -> float:
    """Return the median in milliseconds."""
    return statistics.median(seconds) * 1e3


def timed(call: Callable[[], object]) -> float:
    """Return the seconds a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Loads:
    """The states in which a chunk can be when a request loads it.

    Parameters
    ----------
    folder : Path
        Of the store, which is made.
    count : int
        Chunks.
    shape : Shape
    """

    def __init__(self, folder: Path, count: int, shape: Shape) -> None:
        self.folder = folder
        self.chunks = [chunk_of(number, shape) for number in range(count)]
        with KVStore(folder) as store:
            for key, text, kv in self.chunks:
                store.put(key, IDENTITY, text, content_hash(text), kv)
        self.paths = [folder / "chunks" / key[:2] / f"{key}.safetensors" for key, _, _ in self.chunks]
        # The kernel copies to memory that begins at a multiple of 32 bytes twice as fast as to what bytearray() gives.
        self.plain = memoryview(torch.empty(self.paths[0].stat().st_size, dtype=torch.uint8).numpy())
        inv_freq = 10000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        rotations, layers = (Rotation(inv_freq),) * shape.layers, tuple(range(shape.layers))
        heads, dim = shape.kv_heads, shape.head_dim
        self.geometry = Geometry(shape.layers, heads, heads, dim, dim, rotations, "", 8192, layers)
        # A request's cache is longer than a chunk, so the chunk's place in it is not contiguous.
        self.cache = FusedCache(self.geometry, 5 * TOKENS, CachePool(torch.bfloat16, torch.device("cpu")))
        self.without_tier = KVStore(folder, memory_bytes=0)
        self.new = KVStore(folder, memory_bytes=0)
        # A memory tier that holds one chunk keeps every chunk that is read, and has none that is asked for.
        self.keeping = KVStore(folder, memory_bytes=int(1.5 * self.chunks[0][2].nbytes))
        self.holding = KVStore(folder, memory_bytes=2 * count * self.chunks[0][2].nbytes)
        self.ways = [self.readinto, self.first_read, self.known_file, self.known_file_kept, self.in_memory]

    def close(self) -> None:
        """Close the stores."""
        for store in (self.without_tier, self.new, self.keeping, self.holding):
            store.close()

    def begin(self) -> None:
        """Have a store that has read nothing yet."""
        self.new.close()
        self.new = KVStore(self.folder, memory_bytes=0)

    def readinto(self, number: int) -> None:
        """Read the file into a buffer."""
        with self.paths[number].open("rb", buffering=0) as file:
            view = self.plain
            while count := file.readinto(view):
                view = view[count:]

    def first_read(self, number: int) -> None:
        """Load from a file that this process has not read before, without the memory tier."""
        self._load(self.new, number, "disk")

    def known_file(self, number: int) -> None:
        """Load from a file that it has, without the memory tier."""
        self._load(self.without_tier, number, "disk")

    def known_file_kept(self, number: int) -> None:
        """The same, and the memory tier keeps the chunk for the next request."""
        self._load(self.keeping, number, "disk")

    def in_memory(self, number: int) -> None:
        """Load a chunk that the memory tier holds."""
        self._load(self.holding, number, "memory")

    def _load(self, store: KVStore, number: int, tier: str) -> None:
        key, _, kv = self.chunks[number]
        stored = store.open(key, kv.token_ids)
        if stored is None or stored.tier != tier:
            raise SystemExit(f"chunk {number} does not come from {tier}")
        with stored:
            chunks = [PlacedChunk(Segment(START, START + TOKENS, key), stored)]
            sink = ChunkSink(chunks, self.cache, self.geometry)
            groups = layer_groups(self.geometry.num_layers, resident=tier == "memory")
            feed = ChunkFeed(chunks, sink, groups, None)
            try:
                for layer in range(self.geometry.num_layers):
                    feed.fill(layer)
            finally:
                feed.close()


def load(folder: Path, shape: Shape, count: int = 12, rounds: int = 15) -> dict[str, Any]:
    """Measure loads with files in the page cache and not; the ways take turns, each reads every file in its turn."""
    loads = Loads(folder, count, shape)
    found: dict[str, Any] = {
        "chunk": {**shape._asdict(), "tokens": TOKENS, "dtype": "bfloat16"},
        "file_bytes": len(loads.plain),
    }
    # Files that are new are verified every time.
    time.sleep(2.5)
    for number in range(count):
        key, _, kv = loads.chunks[number]
        with loads.holding.open(key, kv.token_ids) as stored:  # type: ignore[union-attr]
            stored.read_layers(0, shape.layers)
        for way in loads.ways:
            way(number)
    for state in ("warm", "cold"):
        seconds: dict[str, list[float]] = {}
        # Memory has no cold state.
        ways = loads.ways if state == "warm" else loads.ways[:-1]
        for turn in range(rounds if state == "warm" else 3):
            shift = turn % len(ways)
            for way in ways[shift:] + ways[:shift]:
                loads.begin()
                for number in range(count):
                    if state == "cold":
                        drop_page_cache(loads.paths[number].parent)
                    seconds.setdefault(way.__name__, []).append(timed(lambda w=way, n=number: w(n)))
        medians = {name: median_ms(values) for name, values in seconds.items()}
        share = {name: paired_share(seconds["readinto"], values, count) for name, values in seconds.items()}
        found[state] = {"median_ms": medians, "share_of_readinto": share}
    loads.close()
    return found


def paired_share(plain: list[float], ways: list[float], count: int) -> float:
    """Return how many times as fast the one is as the other: the median over rounds of so many calls of each."""
    rounds = range(0, len(plain), count)
    return statistics.median(median_ms(plain[i : i + count]) / median_ms(ways[i : i + count]) for i in rounds)


def loads_by_shape(scratch: Path) -> dict[str, Any]:
    """Measure loads of chunks of a small model and of a larger one."""
    return {name: load(scratch / name, shape) for name, shape in SHAPES.items()}
