"""Parts for LlamaIndex pipelines: an ingestion transformation and a node postprocessor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TransformComponent
from pydantic import ConfigDict

from fused_kv_llm.adapter import FusedKVModel, in_thread
from llama_index_fused_kv.nodes import announce_nodes, texts_of

__all__ = ["FusedKVPostprocessor", "FusedKVTransform"]


class FusedKVTransform(TransformComponent):
    """Prefills the nodes that pass through an ``IngestionPipeline``; put it after the splitter.

    Nodes are not changed. The pipeline's cache skips nodes that it has seen before; their KV must still be in the
    store. The cache key contains the model's identity and the store's folder.

    Parameters
    ----------
    llm : FusedKVLLM
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)

    llm: FusedKVModel

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised forms."""
        return "FusedKVTransform"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the values from which the pipeline makes its cache key."""
        engine = self.llm.engine
        return {"class_name": self.class_name(), "identity": engine.identity, "kv_dir": str(engine.store.kv_dir)}

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Prefill the nodes and return them."""
        texts = texts_of(nodes)
        if texts:
            self.llm.engine.build_kv_cache(texts, progress=False)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Prefill the nodes in a thread and return them."""
        return await in_thread(self, nodes, **kwargs)


class FusedKVPostprocessor(BaseNodePostprocessor):
    """Starts loading the KV of the final nodes; put it last among ``node_postprocessors``.

    Nodes are not changed. Reuse does not depend on it: it loads KV from the disk while the rest of the query runs, and
    lets the LLM warn when node texts do not reach the prompt verbatim.

    Parameters
    ----------
    llm : FusedKVLLM
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(arbitrary_types_allowed=True)

    llm: FusedKVModel

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialised forms."""
        return "FusedKVPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        announce_nodes(self.llm, nodes)
        return nodes
