"""One question through one method: teacher-forced fidelity, time to first token, answer, selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.decoding import end_token_ids
from fused_kv_llm.online import FusedPrompt
from fused_kv_llm.report import lexical_support
from fused_kv_llm.tuning.layer_profile import answer_token_positions

from .methods import FULL, Method
from .metrics import answer_scores, mean_kl, recall
from .questions import Question
from .rules import prefill
from .setting import Setting

__all__ = ["QuestionRun", "measure"]

_RECALL_RATIO = 0.1
_Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class QuestionRun:
    """What one method did with one question.

    Parameters
    ----------
    log_probs : Tensor
        float32 ``[len(gold answer), vocabulary]``, before each token of the teacher-forced gold answer.
    gold_probability : float
        Geometric mean of the probabilities of its tokens.
    ttft_s : float
    report : FusionReport
    answer : str
        Greedy; empty where none was asked for.
    """

    log_probs: Tensor
    gold_probability: float
    ttft_s: float
    report: FusionReport
    answer: str


def run(engine: FusedKVEngine, question: Question, setting: Setting, **options: Any) -> QuestionRun:
    """Prefill a prompt once; score the gold answer and generate from the same KV."""
    gold = engine.token_ids(question.answers[0])
    room = max(len(gold), setting.answer_tokens) + 1
    fused, report, ttft_s = prefill(engine, question.prompt(setting.frame), max_tokens=room, **options)
    try:
        length = fused.cache.length
        logits = fused.logits[None]
        if len(gold) > 1:
            logits = torch.cat((logits, fused.append(engine.loaded, gold[:-1])))
            # Back to the end of the prompt: the rows of the gold answer are overwritten from here on.
            fused.cache.length = length
        answer = _generate(engine, fused, setting.answer_tokens) if setting.answer_tokens else ""
    finally:
        fused.cache.release()
    log_probs = log_softmax(logits, dim=-1)
    of_gold = log_probs.gather(1, torch.tensor(gold, device=log_probs.device)[:, None])
    return QuestionRun(log_probs, float(of_gold.mean().exp()), ttft_s, report, answer)


def _generate(engine: FusedKVEngine, fused: FusedPrompt, max_tokens: int) -> str:
    """Answer greedily, up to the end of the first line, as short-answer sets are scored."""
    ends, ids, logits = end_token_ids(engine.loaded), [], fused.logits
    while len(ids) < max_tokens:
        token = int(logits.argmax())
        if token in ends:
            break
        ids.append(token)
        text = engine.tokenizer.decode(ids, skip_special_tokens=True)
        if "\n" in text.strip():
            break
        logits = fused.append(engine.loaded, [token])[-1]
    lines = engine.tokenizer.decode(ids, skip_special_tokens=True).strip().splitlines()
    return lines[0].strip() if lines else ""


def _recall(engine: FusedKVEngine, question: Question, setting: Setting, options: _Options) -> float | None:
    prompt = question.prompt(setting.frame)
    encoded = engine.renderer.encode(rendered := engine.renderer.render(prompt))
    begin = rendered.text.index(prompt)
    context_end = begin + prompt.rindex(question.passages[-1]) + len(question.passages[-1])
    wanted = answer_token_positions(rendered.text, encoded.offsets, question.answers, begin, context_end)
    if not wanted:
        return None
    fused, *_ = prefill(engine, prompt, **{**options, "recompute_ratio": _RECALL_RATIO})
    fused.cache.release()
    return recall(fused.selected.tolist(), wanted)


def measure(
    engines: dict[str, FusedKVEngine], question: Question, methods: list[Method], setting: Setting
) -> dict[Method, dict[str, Any]]:
    """Return the record of every method; full prefill runs once, first, and is one of them.

    Parameters
    ----------
    engines : dict of str to FusedKVEngine
        By preprocessing; they share one model.
    """
    full = run(engines["none"], question, setting, recompute_ratio=1.0)
    records = {FULL: _record(full, full, question, setting)}
    warm: set[str] = set()
    for method in methods:
        engine = engines[method.preprocessing]
        options: _Options = {"recompute_ratio": method.ratio, "selector": method.selector}
        if method.preprocessing not in warm:
            # Chunk KV in the memory tier for every method alike: the first one would pay the disk for all.
            engine.prefill(question.prompt(setting.frame), recompute_ratio=0.0)[0].cache.release()
            warm.add(method.preprocessing)
        got = run(engine, question, setting, **options)
        record = _record(got, full, question, setting)
        if setting.recall and method.ratio > 0:
            record["recall_10"] = _recall(engine, question, setting, options)
        records[method] = record
    return records


def _record(got: QuestionRun, full: QuestionRun, question: Question, setting: Setting) -> dict[str, Any]:
    report = got.report
    record: dict[str, Any] = {
        "kl": mean_kl(full.log_probs, got.log_probs),
        "top1_agreement": float((got.log_probs.argmax(-1) == full.log_probs.argmax(-1)).float().mean()),
        "gold_probability": got.gold_probability,
        "ttft_s": got.ttft_s,
        "probe_s": report.seconds.get("probe", 0.0) + report.seconds.get("select", 0.0),
        "prompt_tokens": report.prompt_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "selection_bytes": report.selection_bytes,
        "selection_share": report.selection_bytes / max(1, sum(report.bytes_loaded.values())),
        "chunks_found": report.chunks_found,
    }
    if (expected := getattr(report, "expected_divergence", None)) is not None:
        record["expected_divergence"] = float(expected)
    if setting.answer_tokens:
        record["answer"] = got.answer
        record["support"] = lexical_support(got.answer, question.passages).share
        record.update(answer_scores(got.answer, question.answers, full.answer))
    return record
