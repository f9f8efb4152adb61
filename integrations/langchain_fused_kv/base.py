"""What LangChain's text model and chat model have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from langchain_core.documents import Document

from fused_kv_llm.adapter import PER_CALL_OPTIONS, FusedKVModel, batch_progress, keep_index_vectors
from langchain_fused_kv.index_vectors import store_of, vectors_of
from langchain_fused_kv.sources import documents_of

__all__ = ["LangChainFusedKV"]


class LangChainFusedKV(FusedKVModel):
    """A fused-KV model that ingests LangChain documents."""

    items_name: ClassVar[str] = "LangChain documents or strings"

    def _items_of(self, source: Any) -> list[Any]:
        return documents_of(source)

    def _keep_vectors_of(self, source: Any, texts: Sequence[str]) -> None:
        if (store := store_of(source)) is not None:
            keep_index_vectors(self.engine, texts, store.embeddings, lambda: vectors_of(store))

    def _text_of(self, item: Any) -> str:
        return item.page_content if isinstance(item, Document) else super()._text_of(item)

    def proposed(self, prompt: Any) -> Any:
        """Return what the engine is asked for a prompt: a string, messages, or what a prompt template makes."""
        raise NotImplementedError(f"{type(self).__name__} has no prompts")

    def batch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Answer prompts at once, as LangChain's own; a terminal or a notebook shows how far a long batch is."""
        with batch_progress(len(inputs)):
            answers: list[Any] = super().batch(inputs, *args, **kwargs)  # type: ignore[misc]
        return answers

    async def abatch(self, inputs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Do what :meth:`batch` does, asynchronously."""
        with batch_progress(len(inputs)):
            answers: list[Any] = await super().abatch(inputs, *args, **kwargs)  # type: ignore[misc]
        return answers

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on besides the prompt and the stored chunks; LangChain's cache keys contain it."""
        selector = self.engine.selector if self.selector is None else self.selector
        return {
            "model": self.engine.model_id,
            "model_fingerprint": self.engine.model_fingerprint,
            "kv_identity": self.engine.fusion_identity,
            "kv_dir": str(self.engine.store.kv_dir.resolve()),
            "dtype": self.engine.dtype,
            "tenant": self.tenant,
            "wrap_chat_template": self.wrap_chat_template,
            **{name: getattr(self, name) for name in PER_CALL_OPTIONS},
            "selector": selector if isinstance(selector, str) else repr(selector),
            # Not "stop": LangChain overwrites that entry with the stop strings of the call.
            "default_stop": list(self.stop or ()),
        }
