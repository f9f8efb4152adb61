"""LlamaIndex adapters: an LLM that reuses the KV of retrieved nodes, and an index that keeps that KV up to date.

Examples
--------
>>> import tempfile
>>> from llama_index.core.schema import TextNode
>>> from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
>>> from llama_index_fused_kv import FusedKVIndex, FusedKVLLM
>>> nodes = [TextNode(text="The Aldebaran is the largest ferry of the fleet and carries 412 passengers. " * 3)]
>>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp(), max_tokens=8)
>>> index = FusedKVIndex(nodes, embed_model=MiniLMEmbedding())
>>> index.build_kv_cache(llm, progress=False).chunks_new
1
>>> answer = index.as_query_engine(llm=llm).query("How many passengers does the Aldebaran carry?")
>>> llm.last_report.chunks_found
1
"""

from __future__ import annotations

from llama_index_fused_kv.components import FusedKVPostprocessor, FusedKVTransform
from llama_index_fused_kv.indices import FusedKVIndex
from llama_index_fused_kv.ingestion import build_kv_cache
from llama_index_fused_kv.llms import FusedKVLLM
from llama_index_fused_kv.retrievers import (
    FusedKVRetriever,
    QuickFirstRetriever,
    StagedFaissRetriever,
    compact_prompt,
)

__all__ = [
    "FusedKVIndex",
    "FusedKVLLM",
    "FusedKVPostprocessor",
    "FusedKVRetriever",
    "FusedKVTransform",
    "QuickFirstRetriever",
    "StagedFaissRetriever",
    "build_kv_cache",
    "compact_prompt",
]
