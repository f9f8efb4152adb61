"""Retrievers that have nodes loaded, and their prompt computed, before the search ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from fused_kv_llm.adapter import in_thread, search_staged
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.retrieval import FaissStages, QuickFirst, StagedSearch, last_of
from llama_index_fused_kv.llms import FusedKVLLM
from llama_index_fused_kv.nodes import announce_nodes, texts_of

__all__ = ["FusedKVRetriever", "QuickFirstRetriever", "StagedFaissRetriever", "compact_prompt"]

NodePrompt = Callable[[QueryBundle, Sequence[NodeWithScore]], Any]


class FusedKVRetriever(BaseRetriever):
    """Wrap a retriever with stages: while it goes on searching, what it has found is loaded and computed.

    The nodes are those of the last stage. While the engine answers others, nothing is done before.

    Parameters
    ----------
    retriever : object
        It has a method ``stages(query_bundle)`` that yields lists of nodes with scores, the last one final, as
        :class:`StagedFaissRetriever` and :class:`QuickFirstRetriever` have.
    llm : FusedKVLLM
    prompt : callable or None
        Takes the query bundle and the nodes, and returns what the LLM will be asked: a string or chat messages, see
        :func:`compact_prompt`. With it the prompt is computed up to its first token. One that turns out to differ costs
        only that. None loads the nodes' KV only.
    reorder_chunks : bool
        Whether nodes are put into an order in which the prompt begins as an earlier one did, so that at ratio 1 less of
        it is computed (:meth:`fused_kv_llm.FusedKVEngine.order_chunks`). It changes the prompt, and so perhaps the
        answer. Nodes keep their scores.

    Raises
    ------
    ConfigError
        If the retriever has no stages.
    """

    def __init__(
        self,
        retriever: Any,
        llm: FusedKVLLM,
        prompt: NodePrompt | None = None,
        *,
        reorder_chunks: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(retriever, StagedSearch):
            raise ConfigError(
                f"{type(retriever).__name__} has no method stages(query_bundle) that yields lists of nodes, the last "
                "one final. For a remote store put a quick one in front: QuickFirstRetriever(quick, slow)."
            )
        self._staged, self._llm, self._prompt, self._reorders = retriever, llm, prompt, reorder_chunks
        super().__init__(**options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = list(
            search_staged(
                self._llm,
                self._staged.stages(query_bundle),
                texts_of,
                None if self._prompt is None else lambda nodes: self._proposed(query_bundle, nodes),
            )
        )
        found = self._ordered(found, remember=True)
        announce_nodes(self._llm, found)
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found: list[NodeWithScore] = await in_thread(self._retrieve, query_bundle)
        return found

    def _proposed(self, query_bundle: QueryBundle, nodes: Sequence[NodeWithScore]) -> Any:
        if self._prompt is None:
            return None
        return self._llm.proposed(self._prompt(query_bundle, self._ordered(nodes, remember=False)))

    def _ordered(self, nodes: Sequence[NodeWithScore], *, remember: bool) -> list[NodeWithScore]:
        texts = [texts_of([node]) for node in nodes]
        if not self._reorders or not all(texts):
            # Nodes without text are placed by whoever put them there.
            return list(nodes)
        order = self._llm.order_chunks([text for (text,) in texts], remember=remember)
        return [nodes[at] for at in order]


class StagedFaissRetriever(BaseRetriever):
    """Searches a faiss index in stages; the last stage's nodes are those of ``index.search``.

    Parameters
    ----------
    index : faiss.Index
        See :class:`fused_kv_llm.retrieval.FaissStages`.
    nodes : sequence of BaseNode
        In the order in which their vectors were added to the index.
    embed_model : BaseEmbedding
    similarity_top_k : int
        Nodes to return.
    num_stages : int
        See :class:`fused_kv_llm.retrieval.FaissStages`.
    """

    def __init__(
        self,
        index: Any,
        nodes: Sequence[BaseNode],
        embed_model: BaseEmbedding,
        similarity_top_k: int = 2,
        num_stages: int = 4,
        **options: Any,
    ) -> None:
        if len(nodes) != index.ntotal:
            raise ConfigError(f"The index has {index.ntotal} vectors, but {len(nodes)} nodes were given: one each")
        self._stages, self._nodes = FaissStages(index, num_stages), nodes
        self._embed_model, self._top_k = embed_model, similarity_top_k
        super().__init__(**options)

    def stages(self, query_bundle: QueryBundle) -> Iterator[list[NodeWithScore]]:
        """Yield the nodes found so far, the last ones final; scores are the index's distances."""
        vector = query_bundle.embedding or self._embed_model.get_agg_embedding_from_queries(
            query_bundle.embedding_strs
        )  # fmt: skip
        for distances, places in self._stages.search(vector, self._top_k):
            pairs = zip(distances, places, strict=True)
            yield [NodeWithScore(node=self._nodes[int(at)], score=float(score)) for score, at in pairs if at >= 0]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return last_of(self.stages(query_bundle))


class QuickFirstRetriever(BaseRetriever):
    """A quick retriever whose nodes are provisional, and a slow one whose nodes are returned.

    Parameters
    ----------
    quick : BaseRetriever
        For example of a small local copy of a remote store. If it fails the slow one goes on without it.
    slow : BaseRetriever
    """

    def __init__(self, quick: BaseRetriever, slow: BaseRetriever, **options: Any) -> None:
        self._quick, self._slow = quick, slow
        super().__init__(**options)

    def stages(self, query_bundle: QueryBundle) -> Iterator[list[NodeWithScore]]:
        """Yield the quick retriever's nodes, and then the slow one's."""
        yield from QuickFirst(self._quick.retrieve, self._slow.retrieve).stages(query_bundle)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._slow.retrieve(query_bundle)


def compact_prompt(llm: FusedKVLLM, text_qa_template: BasePromptTemplate | None = None) -> NodePrompt:
    """Return what makes the prompt of a query engine with ``response_mode="compact"``, the default.

    Parameters
    ----------
    llm : FusedKVLLM
    text_qa_template : BasePromptTemplate or None
        The query engine's; None is LlamaIndex's own.

    Returns
    -------
    callable
        For :class:`FusedKVRetriever`. Nodes that do not fit into one prompt are asked about in several, which this
        does not foresee.
    """
    template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL

    def prompt(query_bundle: QueryBundle, nodes: Sequence[NodeWithScore]) -> Any:
        context = "\n\n".join(node.node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes)
        filled: dict[str, Any] = {"context_str": context, "query_str": query_bundle.query_str}
        if llm.metadata.is_chat_model:
            return llm._get_messages(template, **filled)
        return llm._get_prompt(template, **filled)

    return prompt
