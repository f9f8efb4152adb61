"""What LangChain's text model and chat model have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from langchain_core.documents import Document

from fused_kv_llm.adapter import FusedKVModel
from fused_kv_llm.errors import CorpusError

__all__ = ["LangChainFusedKV"]


class LangChainFusedKV(FusedKVModel):
    """A fused-KV model that ingests LangChain documents."""

    items_name: ClassVar[str] = "LangChain documents or strings"

    def _texts_of(self, documents: Any) -> list[str]:
        if isinstance(documents, Document):
            raise CorpusError(f"build_kv_cache takes a list of {self.items_name}; put the single one into a list")
        return super()._texts_of(documents)

    def _text_of(self, item: Any) -> str:
        return item.page_content if isinstance(item, Document) else super()._text_of(item)
