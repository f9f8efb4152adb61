"""Indexes whose nodes' KV follows them, and indexes that others made."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    SimpleDirectoryReader,
    StorageContext,
    SummaryIndex,
    VectorStoreIndex,
    load_index_from_storage,
)
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter, get_leaf_nodes
from llama_index.core.retrievers import AutoMergingRetriever, BaseRetriever, QueryFusionRetriever
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores.simple import SimpleVectorStore

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
from fused_kv_llm.errors import CorpusError, FusedKVWarning
from llama_index_fused_kv import FusedKVIndex, FusedKVLLM, FusedKVTransform, build_kv_cache

TEXTS = [
    f"On day {number} of the year the ferry {name} left Skeldra at {number} minutes past nine with {number} cars."
    for number, name in enumerate(["Aldebaran", "Bellatrix", "Castor", "Deneb", "Electra"], start=3)
]


@pytest.fixture
def fresh(engine: FusedKVEngine, tmp_path: Path) -> Any:
    """An LLM with an empty store, on the weights that are loaded already."""
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path / "kv") as made:
        yield FusedKVLLM.from_engine(made, max_tokens=2)


def stored(llm: FusedKVLLM) -> set[str]:
    return {text for text in TEXTS if llm.engine.chunk_id(text)}


def documents(*numbers: int) -> list[Document]:
    return [Document(text=TEXTS[number], doc_id=f"doc-{number}") for number in numbers]


def test_the_kv_follows_the_index(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    index = FusedKVIndex.from_documents(documents(0, 1), embed_model=embed_model)
    assert index.build_kv_cache(fresh, progress=False).chunks_new == 2
    index.insert(documents(2)[0])
    assert stored(fresh) == set(TEXTS[:3])
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert stored(fresh) == set(TEXTS[1:3])
    changed = Document(text=TEXTS[3], doc_id="doc-1")
    assert index.refresh_ref_docs([changed, *documents(2)]) == [True, False]
    assert stored(fresh) == {TEXTS[2], TEXTS[3]}
    index.delete_nodes(list(index.index_struct.nodes_dict)[:1], delete_from_docstore=True)
    assert len(stored(fresh)) == 1


def test_the_kv_follows_asynchronous_changes(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    index = FusedKVIndex.from_documents(documents(0, 1), embed_model=embed_model)
    index.build_kv_cache(fresh, progress=False)

    async def change() -> None:
        await index.ainsert(documents(2)[0])
        await index.adelete_ref_doc("doc-0", delete_from_docstore=True)
        await index.arefresh_ref_docs([Document(text=TEXTS[3], doc_id="doc-1")])

    asyncio.run(change())
    assert stored(fresh) == {TEXTS[2], TEXTS[3]}
    asyncio.run(index.adelete_nodes([*index.index_struct.nodes_dict], delete_from_docstore=True))
    assert stored(fresh) == set()


def test_a_text_that_another_node_has_keeps_its_kv(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    twin = Document(text=TEXTS[0], doc_id="twin")
    index = FusedKVIndex.from_documents([*documents(0), twin], embed_model=embed_model)
    index.build_kv_cache(fresh, progress=False)
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert stored(fresh) == {TEXTS[0]}
    index.delete_ref_doc("twin", delete_from_docstore=True)
    assert stored(fresh) == set()


def test_without_kv_it_is_an_ordinary_index(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    index = FusedKVIndex.from_documents(documents(0), embed_model=embed_model)
    index.insert(documents(1)[0])
    index.delete_ref_doc("doc-0", delete_from_docstore=True)
    assert stored(fresh) == set()


def test_a_reloaded_index(fresh: FusedKVLLM, embed_model: MiniLMEmbedding, tmp_path: Path) -> None:
    FusedKVIndex.from_documents(documents(0, 1), embed_model=embed_model).storage_context.persist(str(tmp_path / "ix"))
    context = StorageContext.from_defaults(persist_dir=str(tmp_path / "ix"))
    reloaded = load_index_from_storage(context, embed_model=embed_model)
    assert build_kv_cache(reloaded, fresh, progress=False).chunks_new == 2
    response = reloaded.as_query_engine(llm=fresh).query("When did the Aldebaran leave?")
    assert fresh.last_report is not None
    assert fresh.last_report.chunks_found == len(response.source_nodes) == 2


def test_other_kinds_of_index(fresh: FusedKVLLM) -> None:
    assert build_kv_cache(SummaryIndex.from_documents(documents(0, 1)), fresh, progress=False).chunks_new == 2
    assert build_kv_cache([TextNode(text=TEXTS[2])], fresh, progress=False).chunks_new == 1


class _TextStore(SimpleVectorStore):
    """A store that keeps the text, as hosted ones do."""

    stores_text: bool = True
    kept: dict[str, BaseNode] = {}  # noqa: RUF012
    opaque: bool = False

    def add(self, nodes: Any, **kwargs: Any) -> list[str]:
        self.kept.update({node.node_id: node for node in nodes})
        return super().add(nodes, **kwargs)

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
        if self.opaque:
            raise NotImplementedError("get_nodes not implemented")
        nodes = [node for id_, node in self.kept.items() if node_ids is None or id_ in node_ids]
        wanted = {f.value for f in filters.filters} if filters else None
        return [node for node in nodes if wanted is None or node.ref_doc_id in wanted]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        self.kept = {id_: node for id_, node in self.kept.items() if node.ref_doc_id != ref_doc_id}
        super().delete(ref_doc_id, **kwargs)


def test_a_vector_store_that_keeps_the_text(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    context = StorageContext.from_defaults(vector_store=_TextStore())
    index = FusedKVIndex.from_documents(documents(0, 1), storage_context=context, embed_model=embed_model)
    assert not index.docstore.docs
    assert index.build_kv_cache(fresh, progress=False).chunks_new == 2
    index.delete_ref_doc("doc-0")
    assert stored(fresh) == {TEXTS[1]}


def test_a_vector_store_that_hides_its_nodes(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    store = _TextStore()
    store.opaque = True
    context = StorageContext.from_defaults(vector_store=store)
    nodes = SentenceSplitter().get_nodes_from_documents(documents(0, 1))
    index = FusedKVIndex(nodes, storage_context=context, embed_model=embed_model)
    with pytest.raises(CorpusError, match=r"_TextStore, which does not give its nodes out.*nodes=nodes"):
        index.build_kv_cache(fresh)
    assert index.build_kv_cache(fresh, nodes=nodes, progress=False).chunks_new == 2
    with pytest.warns(FusedKVWarning, match="KV stays in the store"):
        index.delete_ref_doc("doc-0")


def test_an_index_without_nodes(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    with pytest.raises(CorpusError, match="no nodes"):
        build_kv_cache(VectorStoreIndex([], embed_model=embed_model), fresh)


def test_what_keeps_nodes_is_ingested(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    index = VectorStoreIndex.from_documents(documents(0, 1), embed_model=embed_model)
    assert fresh.build_kv_cache(index, progress=False).chunks_new == 2
    index.insert(documents(2)[0])
    assert fresh.build_kv_cache(index.as_retriever(), progress=False).chunks_new == 1
    index.insert(documents(3)[0])
    assert build_kv_cache(index.docstore, fresh, progress=False).chunks_new == 1
    fusion = QueryFusionRetriever([index.as_retriever(), BM25(documents(4))], llm=fresh, num_queries=1)
    with pytest.raises(CorpusError, match="BM25 does not show where it keeps its nodes"):
        fresh.build_kv_cache(fusion)
    texts = _TextStore()
    texts.kept = {node.node_id: node for node in documents(4)}
    assert fresh.build_kv_cache(texts, progress=False).chunks_new == 1
    assert stored(fresh) == set(TEXTS)
    with pytest.raises(CorpusError, match="nodes out of a int"):
        fresh.build_kv_cache(3)
    with pytest.raises(CorpusError, match="Cannot ingest a int"):
        build_kv_cache([3], fresh)


def test_an_auto_merging_retriever_has_parents(fresh: FusedKVLLM, embed_model: MiniLMEmbedding) -> None:
    whole = Document(text=" ".join(TEXTS))
    nodes = HierarchicalNodeParser.from_defaults(chunk_sizes=[256, 64]).get_nodes_from_documents([whole])
    context = StorageContext.from_defaults()
    context.docstore.add_documents(nodes)
    index = VectorStoreIndex(get_leaf_nodes(nodes), storage_context=context, embed_model=embed_model)
    retriever = AutoMergingRetriever(index.as_retriever(), context)
    assert fresh.build_kv_cache(retriever, progress=False).chunks_new == len(nodes) > len(get_leaf_nodes(nodes))


def test_a_folder_and_what_left_it(fresh: FusedKVLLM, embed_model: MiniLMEmbedding, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(TEXTS[number])

    def ingest() -> Any:
        read = SimpleDirectoryReader(str(folder)).load_data()
        index = FusedKVIndex.from_documents(read, embed_model=embed_model, transformations=[SentenceSplitter()])
        return index.build_kv_cache(fresh, prune=True, progress=False)

    assert ingest().chunks_new == 3
    (folder / "0.txt").unlink()
    (folder / "1.txt").write_text(TEXTS[4])
    report = ingest()
    assert (report.chunks_new, report.chunks_present, report.chunks_deleted) == (1, 1, 2)
    assert "2 deleted" in report.summary()
    assert stored(fresh) == {TEXTS[2], TEXTS[4]}


class BM25(BaseRetriever):
    """A retriever that keeps its nodes where nobody knows."""

    def __init__(self, nodes: list[Document]) -> None:
        super().__init__()
        self._corpus = nodes

    def _retrieve(self, query_bundle: Any) -> list[Any]:
        return []


def test_an_ingestion_pipeline(fresh: FusedKVLLM, engine: FusedKVEngine) -> None:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=128, chunk_overlap=0), FusedKVTransform(llm=fresh)]
    )
    nodes = pipeline.run(documents=documents(0, 1))
    assert [node.get_content() for node in nodes] == TEXTS[:2]
    assert stored(fresh) == set(TEXTS[:2])
    asyncio.run(pipeline.arun(documents=documents(2)))
    assert stored(fresh) == set(TEXTS[:3])
    other = FusedKVTransform(llm=FusedKVLLM.from_engine(engine))
    assert other.to_dict() != FusedKVTransform(llm=fresh).to_dict()
