"""Judge answers by Ragas' faithfulness: run by ``benchmarks/faithfulness.py`` in the environment that has Ragas.

    build/ragas/bin/python benchmarks/ragas_judge.py answers.jsonl --url http://127.0.0.1:8000 --model NAME

Reads lines with ``question, answer, contexts`` and writes a line for each to stdout: ``faithfulness``, or ``error``
where the judge could not be understood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("RAGAS_DO_NOT_TRACK", "true")

import instructor
from openai import AsyncOpenAI
from ragas.llms.base import InstructorLLM
from ragas.metrics.collections import Faithfulness

_SHOWN_CHARS = 300


def judge_of(args: argparse.Namespace) -> Faithfulness:
    """Return the metric; the judge is held to the JSON schema of what it is asked for, if its server does that."""
    client = AsyncOpenAI(base_url=f"{args.url.rstrip('/')}/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
    mode = instructor.Mode.JSON_SCHEMA if args.mode == "json_schema" else instructor.Mode.JSON
    wrapped = instructor.from_openai(client, mode=mode)
    llm = InstructorLLM(client=wrapped, model=args.model, provider="openai", max_tokens=args.tokens,
                        temperature=args.temperature, top_p=1.0)  # fmt: skip
    return Faithfulness(llm=llm)


async def judged(metric: Faithfulness, line: dict[str, Any]) -> dict[str, Any]:
    """Return what the judge says of an answer."""
    try:
        result = await metric.ascore(
            user_input=line["question"], response=line["answer"], retrieved_contexts=line["contexts"]
        )
    except Exception as error:  # whatever a judge's answer breaks in Ragas is recorded, and the next one is asked
        return {"faithfulness": None, "error": f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]}
    if math.isnan(result.value):
        return {"faithfulness": None, "error": "The judge found no statement in the answer."}
    return {"faithfulness": float(result.value), "error": None}


async def main() -> None:
    """Judge line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", choices=("json_schema", "json"), default="json_schema")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=1024, help="longest answer of the judge")
    args = parser.parse_args()
    metric = judge_of(args)
    for text in args.answers.read_text(encoding="utf-8").splitlines():
        print(json.dumps(await judged(metric, json.loads(text))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
