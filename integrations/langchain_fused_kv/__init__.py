"""LangChain adapters: a chat model, an LLM, a retriever and a vector store, so that a chain reuses stored KV.

Examples
--------
>>> import tempfile
>>> from langchain_core.documents import Document
>>> from langchain_core.prompts import PromptTemplate
>>> from langchain_core.runnables import RunnableLambda, RunnablePassthrough
>>> from langchain_fused_kv import FusedKVLLM, FusedKVRetriever
>>> docs = [Document("The Aldebaran is the largest ferry of the fleet and carries 412 passengers. " * 3)]
>>> llm = FusedKVLLM(model="smollm2-135m", kv_dir=tempfile.mkdtemp(), max_tokens=8)
>>> llm.build_kv_cache(docs, progress=False).chunks_new
1
>>> retriever = FusedKVRetriever(retriever=RunnableLambda(lambda query: docs), llm=llm)
>>> format_docs = lambda found: "\\n\\n".join(doc.page_content for doc in found)
>>> prompt = PromptTemplate.from_template("{context}\\n\\nQuestion: {question}")
>>> chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm
>>> answer = chain.invoke("How many passengers does the Aldebaran carry?")
>>> llm.last_report.chunks_found
1
"""

from __future__ import annotations

from langchain_fused_kv.chat_models import ChatFusedKV
from langchain_fused_kv.llms import FusedKVLLM
from langchain_fused_kv.retrievers import FusedKVRetriever
from langchain_fused_kv.staged import QuickFirstRetriever, StagedFaissRetriever
from langchain_fused_kv.vectorstores import FusedKVVectorStore

__all__ = [
    "ChatFusedKV",
    "FusedKVLLM",
    "FusedKVRetriever",
    "FusedKVVectorStore",
    "QuickFirstRetriever",
    "StagedFaissRetriever",
]
