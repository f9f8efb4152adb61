"""What LangChain's text model and chat model have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from langchain_core.documents import Document

from fused_kv_llm.adapter import FusedKVModel
from langchain_fused_kv.sources import documents_of

__all__ = ["LangChainFusedKV"]


class LangChainFusedKV(FusedKVModel):
    """A fused-KV model that ingests LangChain documents."""

    items_name: ClassVar[str] = "LangChain documents or strings"

    def _items_of(self, source: Any) -> list[Any]:
        return documents_of(source)

    def _text_of(self, item: Any) -> str:
        return item.page_content if isinstance(item, Document) else super()._text_of(item)
