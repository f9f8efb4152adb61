"""Chain shapes that people build: in every one of them the KV of what was retrieved is reused, nearly to the token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, dynamic_prompt, wrap_model_call
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel, RunnablePassthrough
from langchain_core.tools import create_retriever_tool, tool
from langgraph.graph import END, START, StateGraph
from reuse import RETRIEVED, Requests

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import FusedKVWarning
from langchain_fused_kv import ChatFusedKV, FusedKVLLM, FusedKVRetriever

QUESTIONS = ["How many passengers can the Aldebaran carry?", "In which year was Larkspur Ferries founded?"]
MESSAGES = ChatPromptTemplate([("system", "Answer from these passages:\n\n{context}"), ("human", "{question}")])

pytestmark = pytest.mark.usefixtures("passed_verbatim")


def join(documents: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in documents)


@pytest.fixture
def llm(engine: FusedKVEngine) -> FusedKVLLM:
    return FusedKVLLM.from_engine(engine, max_tokens=4, recompute_ratio=0.0)


@pytest.fixture
def chat(engine: FusedKVEngine) -> ChatFusedKV:
    return ChatFusedKV.from_engine(engine, max_tokens=4, recompute_ratio=0.0, tools_in_prompt=True)


@pytest.fixture
def chats(chat: ChatFusedKV, monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(chat, monkeypatch)


@pytest.fixture
def chat_retriever(vector_store: FAISS, chat: ChatFusedKV) -> FusedKVRetriever:
    return FusedKVRetriever(retriever=vector_store.as_retriever(search_kwargs={"k": RETRIEVED}), llm=chat)


@pytest.fixture
def chain(retriever: FusedKVRetriever, prompt: PromptTemplate, llm: FusedKVLLM) -> Runnable[str, str]:
    return {"context": retriever | join, "question": RunnablePassthrough()} | prompt | llm | StrOutputParser()


def check(requests: Requests, questions: int = 1) -> None:
    """Nothing retrieved is missing, and at least 95% of its tokens were reused."""
    assert len(requests.retrieved) == RETRIEVED * questions
    assert 0.95 <= requests.share() <= 1.0
    assert [text for report in requests.reports for text in report["unmatched"]] == []
    requests.clear()


async def _ainvoke(chain: Runnable[str, str], question: str) -> str:
    return await chain.ainvoke(question)


async def _astream(chain: Runnable[str, str], question: str) -> str:
    return "".join([piece async for piece in chain.astream(question)])


async def _astream_events(chain: Runnable[str, str], question: str) -> str:
    events = [event async for event in chain.astream_events(question, version="v2")]
    streamed = [event for event in events if event["event"] == "on_llm_stream"]
    assert any("fused_kv" in (event["data"]["chunk"].generation_info or {}) for event in streamed)
    return "".join(event["data"]["chunk"].text for event in streamed)


CALLS: dict[str, Callable[[Runnable[str, str], str], str]] = {
    "invoke": lambda chain, question: chain.invoke(question),
    "stream": lambda chain, question: "".join(chain.stream(question)),
    "ainvoke": lambda chain, question: asyncio.run(_ainvoke(chain, question)),
    "astream": lambda chain, question: asyncio.run(_astream(chain, question)),
    "astream_events": lambda chain, question: asyncio.run(_astream_events(chain, question)),
}


def test_every_way_of_calling_gives_one_answer(chain: Runnable[str, str], requests: Requests) -> None:
    answers = set()
    for call in CALLS.values():
        answers.add(call(chain, QUESTIONS[0]))
        check(requests)
    assert len(answers) == 1


def test_batch_and_abatch(chain: Runnable[str, str], requests: Requests) -> None:
    answers = chain.batch(QUESTIONS)
    check(requests, questions=2)
    assert asyncio.run(chain.abatch(QUESTIONS)) == answers
    check(requests, questions=2)


def test_runnable_parallel_and_assign(
    retriever: FusedKVRetriever, prompt: PromptTemplate, llm: FusedKVLLM, requests: Requests
) -> None:
    found = RunnableParallel(documents=retriever, question=RunnablePassthrough())
    chain = found.assign(
        answer=RunnablePassthrough.assign(context=lambda state: join(state["documents"])) | prompt | llm
    )
    result = chain.invoke(QUESTIONS[0])
    assert len(result["documents"]) == RETRIEVED
    assert result["answer"]
    check(requests)


def test_a_chat_prompt_before_a_text_model(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests) -> None:
    ({"context": retriever | join, "question": RunnablePassthrough()} | MESSAGES | llm).invoke(QUESTIONS[0])
    check(requests)


def test_a_chat_model(chat_retriever: FusedKVRetriever, chat: ChatFusedKV, chats: Requests) -> None:
    chain = {"context": chat_retriever | join, "question": RunnablePassthrough()} | MESSAGES | chat
    answer = chain.invoke(QUESTIONS[0])
    report = answer.response_metadata["fused_kv"]
    assert answer.usage_metadata["input_token_details"]["cache_read"] == report["cached_tokens"]  # type: ignore[index]
    check(chats)


def test_question_before_the_chunks(retriever: FusedKVRetriever, llm: FusedKVLLM, requests: Requests) -> None:
    template = PromptTemplate.from_template("Question: {question}\n\n{context}\n\nAnswer:")
    ({"context": retriever | join, "question": RunnablePassthrough()} | template | llm).invoke(QUESTIONS[0])
    check(requests)


def test_rephrasing_in_front_of_the_retriever(
    retriever: FusedKVRetriever, llm: FusedKVLLM, prompt: PromptTemplate, requests: Requests
) -> None:
    rephrase = PromptTemplate.from_template("Rephrase for a search engine: {question}") | llm
    chain = {"context": rephrase | retriever | join, "question": RunnablePassthrough()} | prompt | llm
    chain.invoke(QUESTIONS[0])
    assert [report["chunks_found"] for report in requests.reports] == [0, RETRIEVED]
    check(requests)


class _State(TypedDict, total=False):
    question: str
    documents: list[Document]
    answer: str


def test_langgraph(chat_retriever: FusedKVRetriever, chat: ChatFusedKV, chats: Requests) -> None:
    def retrieve(state: _State) -> _State:
        return {"documents": chat_retriever.invoke(state["question"])}

    def generate(state: _State) -> _State:
        asked = MESSAGES.invoke({"context": join(state["documents"]), "question": state["question"]})
        return {"answer": chat.invoke(asked).text}

    graph = StateGraph(_State)
    graph.add_sequence([retrieve, generate])
    graph.add_edge(START, "retrieve")
    graph.add_edge("generate", END)
    app = graph.compile()
    assert app.invoke({"question": QUESTIONS[0]})["answer"]
    check(chats)
    asyncio.run(app.ainvoke({"question": QUESTIONS[1]}))
    check(chats)


@wrap_model_call
def look_it_up_once(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Makes a model call a tool that is too small to decide so by itself."""
    answered = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if answered else "any"))


def test_an_agent_with_a_retriever_tool(
    engine: FusedKVEngine, vector_store: FAISS, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatFusedKV.from_engine(engine, max_tokens=24, recompute_ratio=0.0, tools_in_prompt=True)
    requests = Requests(chat, monkeypatch)
    retriever = FusedKVRetriever(retriever=vector_store.as_retriever(search_kwargs={"k": RETRIEVED}), llm=chat)
    search = create_retriever_tool(retriever, "search", "Searches the handbook.")
    agent = create_agent(chat, [search], middleware=[look_it_up_once])
    messages = agent.invoke({"messages": [HumanMessage(QUESTIONS[0])]})["messages"]
    assert [type(message) for message in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert [report["chunks_found"] for report in requests.reports] == [0, RETRIEVED]
    check(requests)


def test_an_agent_with_a_dynamic_prompt(chat_retriever: FusedKVRetriever, chat: ChatFusedKV, chats: Requests) -> None:
    @dynamic_prompt
    def passages(request: ModelRequest) -> str:
        return f"Answer from these passages:\n\n{join(chat_retriever.invoke(request.messages[-1].text))}"

    agent = create_agent(chat, [], middleware=[passages])
    agent.invoke({"messages": [HumanMessage(QUESTIONS[0])]})
    check(chats)


def test_an_agent_whose_tool_returns_json_is_warned_about(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'The "Tern" system keeps all bookings of the ferries.\nIt runs on two machines at Skeldra.'
    chat = ChatFusedKV.from_engine(engine, max_tokens=24, recompute_ratio=0.0, tools_in_prompt=True)
    requests = Requests(chat, monkeypatch)

    @tool
    def search(query: str) -> str:
        """Search the handbook."""
        chat.announce_retrieval([text])
        return json.dumps([{"text": text}])

    agent = create_agent(chat, [search], middleware=[look_it_up_once])
    with pytest.warns(FusedKVWarning, match="line breaks escaped"):
        agent.invoke({"messages": [HumanMessage(QUESTIONS[0])]})
    assert requests.reports[-1]["unmatched"] == [text[:80]]
