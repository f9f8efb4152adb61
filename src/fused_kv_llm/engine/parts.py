"""What an engine is made of: one model, one store, and who works on them.

Everything that happens is in the rooms it imports; here they are put together, named, and taken apart again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from fused_kv_llm.catalog import ChunkCatalog
from fused_kv_llm.chunk import KVIdentity
from fused_kv_llm.config import (
    DEFAULT_MEMORY_BYTES,
    DEFAULT_NEIGHBOURS,
    DEFAULT_PREPROCESSING,
    DEFAULT_RATIO,
    DEFAULT_SELECTOR,
    check_preprocessing,
    check_ratio,
    parse_bytes,
)
from fused_kv_llm.context_shift import CONTEXT_SHIFT
from fused_kv_llm.engine.calibration import read_calibration
from fused_kv_llm.model import BufferPool, LoadedModel, compute_prefix, load_model
from fused_kv_llm.offline import AnchorBuilder, BackgroundIngestor, CorpusPlanner, Ingestor, Similarity, as_embedder
from fused_kv_llm.online import RequestPlanner, reader_threads
from fused_kv_llm.prompt import ChatPrompt, PromptRenderer
from fused_kv_llm.selectors import Selector, resolve_selector
from fused_kv_llm.store import DEFAULT_POLICY, KVStore
from fused_kv_llm.thread_pool import ThreadPool

__all__ = ["EngineParts", "Messages"]

Messages = Sequence[dict[str, Any]]


class EngineParts:
    """The model, the store and who works on them; see ``FusedKVEngine``, which is one, for the parameters."""

    def __init__(
        self,
        model: str | Path | LoadedModel | Any = "smollm2-135m",
        *,
        tokenizer: Any | None = None,
        kv_dir: str | Path = "./kv",
        recompute_ratio: float | Literal["auto"] = DEFAULT_RATIO,
        selector: str | Selector = DEFAULT_SELECTOR,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        memory_bytes: int | str = DEFAULT_MEMORY_BYTES,
        disk_bytes: int | str | None = None,
        policy: str = DEFAULT_POLICY,
        kv_dtype: str = "auto",
        remote: str | None = None,
        preprocessing: str = DEFAULT_PREPROCESSING,
        num_neighbours: int = DEFAULT_NEIGHBOURS,
        embedder: Any | None = None,
        tenant: str = "",
        store_misses: bool = True,
        wrap: bool = True,
    ) -> None:
        self.tenant, self.wrap, self.store_misses = tenant, wrap, store_misses
        self.memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
        self.preprocessing, self.num_neighbours = check_preprocessing(preprocessing, num_neighbours)
        self._similarity = (
            Similarity(num_neighbours, as_embedder(embedder), Path(kv_dir) / "vectors.sqlite")
            if preprocessing == "similar"
            else None
        )
        # Wrong options and a folder that cannot be used are known at once; loading a model takes long.
        if recompute_ratio != "auto":
            check_ratio(recompute_ratio)
        resolve_selector(selector)
        self.store = KVStore(
            kv_dir,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            policy=policy,
            kv_dtype=kv_dtype,
            remote=remote,
        )
        try:
            self.loaded = (
                model
                if isinstance(model, LoadedModel)
                else load_model(model, tokenizer=tokenizer, dtype=dtype, device=device)
            )
            self._assemble()
            self.recompute_ratio, self._selector = self._chosen(recompute_ratio, selector)
        except BaseException:
            self.store.close()
            raise

    def _chosen(self, ratio: float | Literal["auto"] | None, selector: str | Selector | None) -> tuple[float, Selector]:
        """Return the ratio and the selector to use; a calibration gives both."""
        if ratio == "auto":
            found = read_calibration(self.store.kv_dir, self.identity)
            return found.recompute_ratio, resolve_selector(found.selector)
        return (
            self.recompute_ratio if ratio is None else check_ratio(ratio),
            self._selector if selector is None else resolve_selector(selector),
        )

    def _assemble(self) -> None:
        self._closed = False
        self._model_lock = threading.Lock()
        threads = reader_threads(self.loaded.device)
        self._readers = ThreadPool(threads, "fused-kv-read") if threads else None
        self.renderer = PromptRenderer(self.loaded.tokenizer, wrap=self.wrap)
        self.identity = self._identify(self.tenant)
        self.store.describe(self.identity, ", ".join(self._description()))
        self._prefix = compute_prefix(self.loaded, tuple(self.renderer.header_ids))
        self._catalog = ChunkCatalog(self.store, self.identity)
        room = self.context_length - len(self._prefix.token_ids)
        planner = CorpusPlanner(
            self._catalog, self.identity, self.renderer.encode_chunk, room, self._similarity,
            lambda key: self.store.sidecars.has(key, CONTEXT_SHIFT),
        )  # fmt: skip
        self._ingestor = Ingestor(self.loaded, self.store, self.identity, self._prefix, planner, self._model_lock)
        self._sides = self.store.sidecars
        self._anchors = AnchorBuilder(
            self.loaded, self.store, self._prefix, self.renderer.encode_chunk, self._model_lock
        )
        self._planner = RequestPlanner(
            self.renderer,
            self.store,
            self.identity,
            self._prefix.token_ids,
            self._catalog,
            self.context_length,
            self.model_id,
            self._remember,
        )
        self._buffers = BufferPool(self.loaded.dtype, self.loaded.device)
        self._background = BackgroundIngestor(self._ingestor) if self.store_misses else None

    def _description(self) -> list[str]:
        stored = [] if self.kv_dtype == "auto" else [f"stored in {self.kv_dtype}"]
        return [self.model_id, self.dtype, *stored, self.preprocessing]

    def _identify(self, tenant: str) -> str:
        ids = ",".join(map(str, self.renderer.header_ids))
        return KVIdentity(
            model=self.loaded.fingerprint,
            tokenizer=self.loaded.tokenizer_fingerprint,
            dtype=self.dtype,
            rope=self.loaded.geometry.rope_digest,
            prefix=hashlib.sha256(ids.encode()).hexdigest(),
            preprocessing="none" if self._similarity is None else f"similar:{self._similarity.count}:{CONTEXT_SHIFT}",
            kv_dtype=self.kv_dtype,
            tenant=tenant,
        ).digest

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.loaded.tokenizer

    @property
    def model_id(self) -> str:
        """Alias, path, hub id or class name of the model."""
        return self.loaded.model_id

    @property
    def model_fingerprint(self) -> str:
        """Content fingerprint of the weights."""
        return self.loaded.fingerprint

    @property
    def device(self) -> str:
        """Where the model is, for example ``"cpu"``."""
        return str(self.loaded.device)

    @property
    def dtype(self) -> str:
        """Compute dtype, for example ``"bfloat16"``."""
        return str(self.loaded.dtype).removeprefix("torch.")

    @property
    def kv_dtype(self) -> str:
        """Dtype in which keys and values are stored; ``"auto"`` is :attr:`dtype`."""
        return "auto" if self.store.kv_dtype == self.dtype else self.store.kv_dtype

    @property
    def choice(self) -> str:
        """Which dtype and device are used, and why."""
        return self.loaded.choice

    @property
    def selector(self) -> str:
        """Name of the default selector."""
        return self._selector.name

    @property
    def context_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.loaded.geometry.context_length

    def token_ids(self, text: str) -> list[int]:
        """Return a text's ids, special-token text read as ordinary text."""
        return self.renderer.encode_chunk(text)

    def encode(self, prompt: str | Messages | ChatPrompt) -> list[int]:
        """Return the ids the model sees for a prompt: rendered and tokenised once, whole."""
        return list(self.renderer.encode(self.renderer.render(prompt)).ids)

    def _remember(self, text: str) -> None:
        if self._background is not None:
            self._background.expect([text])

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self._closed

    def close(self) -> None:
        """Finish background work and close the store; the model stays usable."""
        self._closed = True
        if self._background is not None:
            self._background.close()
        if self._readers is not None:
            self._readers.close()
        self.store.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.close()
