"""Answers that begin before the search has ended: faiss over a million vectors, and an index that is slow.

    python benchmarks/speculation.py --data ../shared/data/squad10.jsonl

Each question's query vector lies near its passages' vectors, among random clusters. Both retrievers go through
LangChain's ``FusedKVRetriever``, with and without ``speculative=True``, in turn and in the same run: once while nobody
else is answered, and once while eight others are. "faiss" is the index as it is; "delayed" sleeps before its last
stage, as an index on a disk or behind a network would wait. A first token cannot come sooner than the search ends, so
it is sooner by the time of the search or of the prompt, whichever is shorter: `possible_share` of the search. Nothing
is proposed while others are answered; what that costs is small beside how much first tokens differ then, so more
questions are asked, and `later_ms` is the median of the differences with the middle 95 % of its resampled values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from environment import environment
from evaluation.questions import Question, read_questions
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.retrieval import FaissStages, last_of
from langchain_fused_kv import FusedKVLLM, FusedKVRetriever

_OTHERS = 8
_SPREAD = 0.6


class MillionVectors(BaseRetriever):
    """The passages' vectors among many others that have no text."""

    index: Any
    texts: list[str]
    queries: dict[str, Any]
    k: int
    delay_s: float = 0.0

    def stages(self, query: str) -> Iterator[list[Document]]:
        """Yield what has been found; the last stage is delayed."""
        searched = FaissStages(self.index).search(self.queries[query], self.k)
        before: list[Document] | None = None
        for _, places in searched:
            if before is not None:
                yield before
            before = [Document(self.texts[at]) for at in places if 0 <= at < len(self.texts)]
        time.sleep(self.delay_s)
        yield before or []

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return last_of(self.stages(query))


def built(questions: list[Question], vectors: int, dim: int, nprobe: int) -> tuple[Any, list[str], dict[str, Any]]:
    """Return an IVF index, the passages' texts at its first places, and a query vector for every question."""
    drawn = np.random.default_rng(0)
    texts, queries, own = [], {}, []
    for question in questions:
        centre = drawn.normal(size=dim)
        queries[question.question] = centre.astype(np.float32)
        texts += question.passages
        own.append(centre + 0.5 * drawn.normal(size=(len(question.passages), dim)) / dim**0.5)
    clusters = drawn.normal(size=(1000, dim)).astype(np.float32)
    index = faiss.index_factory(dim, f"IVF{max(16, int(4 * vectors**0.5))},Flat")
    index.cp.niter = 4
    index.cp.max_points_per_centroid = 40
    first = np.concatenate(own).astype(np.float32)
    blocks = [clusters[drawn.integers(0, 1000, 50_000)] + _SPREAD * drawn.normal(size=(50_000, dim)).astype(np.float32)
              for _ in range(max(1, vectors // 50_000))]  # fmt: skip
    index.train(np.concatenate((first, *blocks[:4])))
    for block in (first, *blocks):
        index.add(block)
    index.nprobe = min(nprobe, index.nlist)
    return index, texts, queries


def ask(llm: FusedKVLLM, retriever: FusedKVRetriever, question: Question) -> dict[str, Any]:
    """Ask one question through a retriever; return seconds from the question to the first token, and the answer."""
    llm.engine.clear_prefix_cache()
    begun_s = time.perf_counter()
    found = retriever.invoke(question.question)
    searched_s = time.perf_counter() - begun_s
    handle = llm.engine.submit(prompt_of(question.question, found), max_tokens=llm.max_tokens)
    handle.wait_for_first()
    first_s = time.perf_counter() - begun_s
    answer = handle.result()
    report = answer.report
    return {"first_s": first_s, "search_s": searched_s, "hidden_s": report.search_hidden_s,
            "outcome": report.speculation, "ids": answer.token_ids}  # fmt: skip


def prompt_of(question: str, found: list[Document]) -> str:
    """Return the prompt of a question and its passages."""
    return "\n\n".join([*(doc.page_content for doc in found), f"Question: {question}\nAnswer briefly."])


class Others:
    """Requests that are being answered meanwhile; a context manager."""

    def __init__(self, engine: FusedKVEngine, prompts: list[str], count: int) -> None:
        self._engine, self._prompts, self._count = engine, prompts, count
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        self.tokens = 0

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            for _ in self._engine.stream(self._prompts[number % len(self._prompts)], max_tokens=256):
                self.tokens += 1
                if self._over.is_set():
                    break

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        while self._count and self.tokens < 4 * self._count:
            time.sleep(0.05)
        return self

    def __exit__(self, *args: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def compare(llm: FusedKVLLM, inner: MillionVectors, questions: list[Question], repeats: int) -> dict[str, Any]:
    """Ask all questions with and without speculation, in turn."""
    ways = {
        "off": FusedKVRetriever(retriever=inner, llm=llm),
        "on": FusedKVRetriever(retriever=inner, llm=llm, speculative=True, prompt=prompt_of),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number in range(repeats * len(questions)):
        question = questions[number % len(questions)]
        for name in list(ways)[:: 1 if number % 2 else -1]:
            found[name].append(ask(llm, ways[name], question))
    median = {name: statistics.median(one["first_s"] for one in rows) for name, rows in found.items()}
    search_s = statistics.median(one["search_s"] for one in found["off"])
    differences = [one["first_s"] - other["first_s"] for one, other in zip(found["off"], found["on"], strict=True)]
    sooner = statistics.median(differences)
    resampled = np.median(np.random.default_rng(0).choice(differences, (2000, len(differences))), axis=1)
    spread = np.quantile(resampled, (0.975, 0.025)).tolist()
    prompt_s = statistics.median(one["first_s"] - one["search_s"] for one in found["off"])
    outcomes = [one["outcome"] for one in found["on"]]
    return {
        "search_ms": round(1e3 * search_s, 2),
        "first_token_ms": {name: round(1e3 * value, 1) for name, value in median.items()},
        "hidden_share": round(statistics.mean(one["hidden_s"] / one["search_s"] for one in found["on"]), 3),
        "possible_share": round(min(1.0, prompt_s / search_s), 3),
        "sooner_by_share_of_search": round(sooner / search_s, 3),
        "later_percent": round(-100 * sooner / median["off"], 2),
        "later_ms": [round(-1e3 * value, 1) for value in (sooner, *spread)],
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "equal_answers": sum(one["ids"] == other["ids"] for one, other in zip(found["off"], found["on"], strict=True)),
        "asked": len(outcomes),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--nprobe", type=int, default=1024)
    parser.add_argument("--delays-s", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--repeats", type=int, default=3, help="how often each question is asked")
    parser.add_argument("--saturated-repeats", type=int, default=6, help="the same while others are answered")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    args = parser.parse_args()
    questions = read_questions(args.data, args.questions, args.passages)
    begun_s = time.perf_counter()
    index, texts, queries = built(questions, args.vectors, args.dim, args.nprobe)
    result: dict[str, Any] = {
        "environment": environment(), "vectors": index.ntotal, "dim": args.dim, "clusters": index.nlist,
        "nprobe": index.nprobe, "passages": args.passages,
    }  # fmt: skip
    print(f"index of {index.ntotal} vectors made in {time.perf_counter() - begun_s:.1f} s", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        FusedKVEngine("smollm2-135m", kv_dir=folder, dtype=args.dtype, preprocessing="none") as engine,
    ):
        engine.build_kv_cache(texts, progress=False)
        llm = FusedKVLLM.from_engine(engine, max_tokens=args.max_tokens)
        background = [prompt_of(one.question, [Document(text) for text in one.passages[:2]]) for one in questions]
        for kind, delay_s in [("faiss", 0.0), *((f"delayed_{delay_s:g}s", delay_s) for delay_s in args.delays_s)]:
            inner = MillionVectors(index=index, texts=texts, queries=queries, k=args.passages, delay_s=delay_s)
            for state, count, repeats in (("idle", 0, args.repeats), ("saturated", _OTHERS, args.saturated_repeats)):
                with Others(engine, background, count):
                    found = compare(llm, inner, questions, repeats)
                result[f"{kind}_{state}"] = found
                print(kind, state, json.dumps(found), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
