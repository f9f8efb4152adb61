"""How far a full prefill in bfloat16 is from one in float32: plain transformers' and the engine's.

    python benchmarks/rounding.py --data ../shared/data/musique_train100.jsonl --questions 40

The float32 model is plain transformers'. Each forward reads a prompt of ten passages and the gold answer behind it; the
distributions before the answer's tokens are compared. The engine reuses nothing (ratio 1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment
from evaluation.measure import run
from evaluation.metrics import mean_kl
from evaluation.questions import FRAMES, Question, read_questions
from evaluation.setting import Setting
from rich.progress import track
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model.pretrained import locate

_Forward = Callable[[Question], Tensor]


def plain_forward(engine: FusedKVEngine, source: str, frame: str, dtype: torch.dtype) -> _Forward:
    """Return transformers' own forward, which gives float32 log-probabilities ``[gold tokens, vocabulary]``."""
    model = AutoModelForCausalLM.from_pretrained(locate(source)[1], dtype=dtype).eval()

    def forward(question: Question) -> Tensor:
        gold = engine.token_ids(question.answers[0])
        ids = torch.tensor([[*engine.encode(question.prompt(frame)), *gold[:-1]]])
        with torch.inference_mode():
            return log_softmax(model(ids, logits_to_keep=len(gold)).logits[0].float(), dim=-1)

    return forward


def summarise(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means, and by how much nearer the engine is, as a geometric mean."""
    plain, own = ([record[name] for record in records] for name in ("transformers", "engine"))
    return {
        "transformers": statistics.mean(plain),
        "engine": statistics.mean(own),
        "ratio": statistics.geometric_mean(b / a for a, b in zip(plain, own, strict=True)),
        "nearer": statistics.mean(b < a for a, b in zip(plain, own, strict=True)),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--passages", type=int, default=10)
    parser.add_argument("--frame", choices=FRAMES, default="short")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rounding_cpu.json")
    args = parser.parse_args()
    questions = read_questions(args.data, args.questions, args.passages)
    setting = Setting(frame=args.frame, passages=args.passages)
    records = []
    with (
        tempfile.TemporaryDirectory(prefix="fused-kv-rounding-") as folder,
        FusedKVEngine(args.model, kv_dir=folder, dtype="bfloat16", device="cpu") as engine,
    ):
        exact, plain = (
            plain_forward(engine, args.model, args.frame, dtype) for dtype in (torch.float32, torch.bfloat16)
        )
        for question in track(questions):
            wanted, own = exact(question), run(engine, question, setting, recompute_ratio=1.0).log_probs
            records.append(
                {
                    "question": question.id,
                    "transformers": mean_kl(wanted, plain(question)),
                    "engine": mean_kl(wanted, own),
                }
            )
    summary = summarise(records)
    head = {"environment": environment(), "model": args.model, "data": args.data.stem, "frame": args.frame}
    args.out.write_text(json.dumps({**head, "summary": summary, "records": records}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
