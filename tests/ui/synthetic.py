"""A server's answers for requests of any length: the screens' speed and forms are tested without a model."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from fused_kv_llm import FusionReport
from fused_kv_llm.report.trace import PromptTrace
from fused_kv_llm.report.verdict import Outcome, Verdict

WORDS = (
    "ferry",
    "harbour",
    "ticket",
    "deck",
    "cabin",
    "Aldebaran",
    "island",
    "fare",
    "sailing",
    "crew",
    "winter",
    "cars",
)
LAYERS = [10, 12, 14, 17]


def prompt_trace(tokens: int, chunks: int = 8) -> PromptTrace:
    """Return a prompt of words: a header, chunks with an edge between them, and a question; a seventh is recomputed."""
    draw = random.Random(tokens)
    text, offsets = [], []
    at = 0
    for number in range(tokens):
        word = draw.choice(WORDS) + (".\n" if number % 23 == 22 else " ")
        text.append(word)
        offsets.append((at, at + len(word)))
        at += len(word)
    kind = np.full(tokens, -1, dtype=np.int64)
    kind[:20] = -2
    each = (tokens - 60) // chunks
    for chunk in range(chunks):
        first = 20 + chunk * each
        kind[first : first + each - 4] = chunk
    in_chunks = np.flatnonzero(kind >= 0)
    recomputed = np.array(sorted(draw.sample(in_chunks.tolist(), len(in_chunks) // 7)), dtype=np.int64)
    return PromptTrace("".join(text), np.array(offsets, dtype=np.int64), kind, recomputed)


def plain_trace(trace: PromptTrace) -> dict[str, Any]:
    """Return what ``/v1/requests/ID/trace`` says of it, with scores of four layers."""
    states = trace.states()
    in_chunks = trace.kind >= 0
    draw = np.random.default_rng(0)
    scores = draw.gamma(0.3, size=(len(LAYERS), int(in_chunks.sum()))) + 3 * (states[in_chunks] == 2)
    total: list[float | None] = [None] * len(states)
    for position, score in zip(np.flatnonzero(in_chunks), scores.mean(0), strict=True):
        total[int(position)] = round(float(score), 5)
    return {
        "text": trace.text,
        "tokens": trace.offsets.tolist(),
        "states": states.tolist(),
        "chunk": np.maximum(trace.kind, -1).tolist(),
        "selection": {"layers": LAYERS, "scores": scores.round(5).tolist(), "total": total},
        "model_layers": 30,
    }


def report(trace: PromptTrace, verdicts: list[Verdict]) -> FusionReport:
    """Return the report that goes with a prompt."""
    prefix, reused, recomputed, fresh = (int((trace.states() == state).sum()) for state in range(4))
    return FusionReport(
        prompt_tokens=len(trace.kind),
        prefix_tokens=prefix,
        reused_tokens=reused,
        recomputed_tokens=recomputed,
        fresh_tokens=fresh,
        completion_tokens=41,
        chunks_found=len(trace.chunks()),
        verdicts=verdicts,
        recompute_ratio=0.15,
        selector="sink_attention",
        bytes_loaded={"memory": 31_000_000, "disk": 142_000_000},
        sidecar_bytes_loaded={"context_shift": 6_100_000},
        selection_bytes=91_000_000,
        own_kv_bytes=44_000_000,
        shared_kv_bytes=173_000_000,
        seconds={"align": 0.004, "load": 0.05, "select": 0.06, "fuse": 0.29, "first_token": 0.01, "step": 0.021},
        ttft_s=0.42,
        warnings=["The store is on a slow disk: 142 MB took 0.05 s"],
    )


def verdicts(chunks: list[tuple[str, int, int]]) -> list[Verdict]:
    """Return one verdict for each chunk, and some of chunks that were not reused."""
    found = [Verdict.of(text, Outcome.REUSED, tokens=reused + again) for text, reused, again in chunks]
    diff = "--- ingested\n+++ prompt\n-Fares are paid on board.\n+Fares are paid on  board."
    return [
        *found,
        Verdict.of(
            "Fares are paid on board. <b>Dogs</b> too.",
            Outcome.RESPACED,
            "Its white space differs",
            "Send it as it was ingested",
            diff=diff,
        ),
        Verdict.of(
            "The timetable of the winter, which nobody ingested.",
            Outcome.NOT_INGESTED,
            "Nothing is stored for it",
            "Ingest it",
        ),
        Verdict.of(
            "History of the company <script>alert(1)</script>",
            Outcome.EVICTED,
            "It made room for others",
            "Refresh its document",
        ),
    ]


def detail(trace: PromptTrace, id_: str = "chatcmpl-synthetic") -> dict[str, Any]:
    """Return what ``/v1/requests/ID`` says of a prompt."""
    judged = verdicts(trace.chunks())
    made = report(trace, judged).to_dict()
    made["timeline"] = [
        {"stage": stage, "start_s": start, "end_s": end}
        for stage, start, end in (
            ("align", 0, 0.004),
            ("load", 0.004, 0.054),
            ("select", 0.03, 0.11),
            ("fuse", 0.11, 0.4),
        )
    ]
    in_prompt = len(trace.chunks())
    chunks = [
        {
            "text": trace.chunks()[number][0] if number < in_prompt else verdict.text,
            "score": 0.9 - number / 20,
            "document_id": f"doc-{number}" if verdict.outcome is not Outcome.NOT_INGESTED else None,
            "source": ("01-fleet.txt", "03-fares.txt", '<img src=x onerror="alert(1)">.txt')[number % 3],
            "tier": "memory" if number % 2 else "disk",
            "verdict": verdict.to_dict(),
            "tokens": verdict.tokens,
            "prompt_chunk": number if number < in_prompt else None,
        }
        for number, verdict in enumerate(judged)
    ]
    return {
        **summary(id_, made),
        "report": made,
        "answer": "It carries 412 passengers <b>and</b> 96 cars.",
        "messages": [],
        "chunks": chunks,
        "detail_available": True,
    }


def summary(id_: str, report: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    """Return a row of ``/v1/requests``."""
    names = (
        "selector",
        "recompute_ratio",
        "prompt_tokens",
        "completion_tokens",
        "prefix_tokens",
        "reused_tokens",
        "recomputed_tokens",
        "fresh_tokens",
        "ttft_s",
    )
    return {
        "id": id_,
        "created_s": 1_795_000_000.0,
        "endpoint": "/v1/chat/completions",
        "model": "smollm2-135m",
        "status": "ok",
        **{name: report[name] for name in names},
        "latency_s": 1.2,
        "saved_s": 1.9,
        "verdicts": {"reused": 8, "respaced": 1},
        "question": "How many passengers can the Aldebaran carry?",
        **other,
    }


def answer_with(page: Any, answers: Mapping[str, Any]) -> None:
    """Answer a page's requests in the server's place, by the beginning of their path (the longest that fits)."""

    def answer(route: Any) -> None:
        path = route.request.url.split("/", 3)[3]
        fitting = [one for one in answers if f"/{path}".startswith(one)]
        if not fitting:
            route.continue_()
        else:
            route.fulfill(content_type="application/json", body=json.dumps(answers[max(fitting, key=len)]))

    page.route("**/v1/**", answer)
