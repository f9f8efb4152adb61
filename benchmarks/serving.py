"""Many users at once: throughput, time to first token and gaps between tokens, beside other engines.

    python benchmarks/serving.py --data ../shared/data/squad10.jsonl
    python benchmarks/serving.py --data ../shared/data/squad10.jsonl --at-once 8 --systems fused

A closed loop has so many users at once, each with the next question as soon as the last is answered. An open loop
(``--rate``, requests a second) lets them come as a Poisson process, whether or not the last ones are answered. Every
question has ten passages, about 1,650 tokens with the wording; every answer has 64 tokens. "Short" is a closed loop of
questions without passages: hardly more than decoding. "Gap" watches seven answers that are being written while a
prompt of about 5,000 tokens begins beside them.

The systems, with the same prompts, one after another, each after a request that is not counted: the engine ("fused");
transformers' ``generate`` with SDPA, one request at a time ("plain"); its continuous batching, eight at once
("generate_batch"); and vLLM on the CPU ("vllm"), which `serving_vllm.py` installs into an environment of its own, and
which is left out, with a message, where it cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from environment import environment
from evaluation.questions import read_corpus, read_questions
from serving_load import closed_loop, gap_beside_a_long_prompt, open_loop, timed
from serving_pictures import draw, print_tables
from serving_systems import continuous_batching, of_engine, of_generate
from serving_vllm import MissingPeerError, measure_vllm
from transformers import AutoModelForCausalLM

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model.pretrained import locate

SYSTEMS = ("fused", "plain", "generate_batch", "vllm")
RUNNING, LONG_PASSAGES, LONG_ANSWER = 7, 38, 1000
SHORT_AT_ONCE, GENERATE_BATCH_AT_ONCE = 8, 8
# Fewest requests of a load.
FEWEST = 8
_request_numbers = count(1)


class Questions:
    """What is asked: texts for the engine, the same as token ids for the others."""

    def __init__(self, args: argparse.Namespace, engine: FusedKVEngine) -> None:
        questions = read_questions(args.data, args.questions, 10)
        corpus = read_corpus(args.data)
        self.prompts = [question.prompt("instruct") for question in questions]
        self.short = [question.question for question in questions]
        self.passages = [text for text in corpus if any(text in prompt for prompt in self.prompts)]
        self.long = "Summarise the context.\n\nContext:\n" + "\n\n".join(self.passages[-LONG_PASSAGES:])
        self._encode: Callable[[str], list[int]] = engine.encode

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of prompts."""
        return [list(self._encode(text)) for text in texts]


def repeated(prompts: list[str], users: int, rounds: int) -> list[str]:
    """Return the prompts of a load: so many a user, in turn, with other first words each time.

    No system then answers one from what it kept of an earlier one.
    """
    numbers = range(max(FEWEST, rounds * users))
    return [f"{next(_request_numbers)}. {prompts[number % len(prompts)]}" for number in numbers]


def of_fused(args: argparse.Namespace, engine: FusedKVEngine, asked: Questions) -> dict[str, Any]:
    """Measure the engine."""
    answer = of_engine(engine, args.max_tokens)
    timed(answer, asked.prompts[0])
    rows = [
        {"load": "closed", "at_once": users, **closed_loop(answer, repeated(asked.prompts, users, args.rounds), users)}
        for users in args.at_once
    ]
    rows += [{"load": "open", "rate_per_s": rate, **open_loop(answer, asked.prompts, rate)} for rate in args.rate]
    short = repeated(asked.short, SHORT_AT_ONCE, args.rounds)
    rows.append({"load": "short", "at_once": SHORT_AT_ONCE, **closed_loop(answer, short, SHORT_AT_ONCE)})
    long_answer = of_engine(engine, LONG_ANSWER)
    return {"rows": rows, "gap": gap_beside_a_long_prompt(long_answer, asked.prompts[:RUNNING], asked.long)}


def plain_model(args: argparse.Namespace, engine: FusedKVEngine) -> Any:
    """Return the same weights as transformers runs them."""
    return AutoModelForCausalLM.from_pretrained(
        locate(args.model)[1], dtype=engine.loaded.dtype, attn_implementation="sdpa"
    ).eval()


def of_plain(args: argparse.Namespace, engine: FusedKVEngine, asked: Questions) -> dict[str, Any]:
    """Measure transformers' ``generate``."""
    answer = of_generate(plain_model(args, engine), args.max_tokens)
    prompts = asked.ids(repeated(asked.prompts, 1, args.rounds))
    timed(answer, prompts[0])
    return {"rows": [{"load": "closed", "at_once": 1, **closed_loop(answer, prompts, 1)}]}


def of_generate_batch(args: argparse.Namespace, engine: FusedKVEngine, asked: Questions) -> dict[str, Any]:
    """Measure transformers' continuous batching, with a cache made for each load."""
    plain, users, rows = plain_model(args, engine), GENERATE_BATCH_AT_ONCE, []
    for load, texts in (("closed", asked.prompts), ("short", asked.short)):
        # One round: it takes minutes.
        prompts = asked.ids(repeated(texts, users, 1))
        longest = max(map(len, prompts))
        with continuous_batching(plain, args.max_tokens, users, longest) as answer:
            timed(answer, asked.ids(asked.short)[0])
            rows.append({"load": load, "at_once": users, **closed_loop(answer, prompts, users)})
    return {"rows": rows}


def of_vllm(args: argparse.Namespace, engine: FusedKVEngine, asked: Questions) -> dict[str, Any]:
    """Measure vLLM."""
    loads = [("closed", users, asked.prompts) for users in args.at_once] + [("short", SHORT_AT_ONCE, asked.short)]
    return measure_vllm(
        {
            "model": locate(args.model)[1],
            "dtype": engine.dtype,
            "threads": torch.get_num_threads(),
            "loads": [
                {"name": name, "at_once": users, "max_tokens": args.max_tokens,
                 "prompts": asked.ids(repeated(texts, users, args.rounds))}
                for name, users, texts in loads
            ],
            "gap": {"prompts": asked.ids(asked.prompts[:RUNNING]), "long_prompt": asked.ids([asked.long])[0],
                    "max_tokens": LONG_ANSWER},
        }
    )  # fmt: skip


def measure(args: argparse.Namespace, engine: FusedKVEngine, asked: Questions) -> dict[str, Any]:
    """Measure every system."""
    ways = {"fused": of_fused, "plain": of_plain, "generate_batch": of_generate_batch, "vllm": of_vllm}
    rows, gaps, versions = list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()
    for system in args.systems:
        try:
            found = ways[system](args, engine, asked)
        except MissingPeerError as error:
            print(f"{system} is left out. {error}")
            continue
        rows += [{"system": system, **row} for row in found["rows"]]
        gaps |= {system: found["gap"]} if found.get("gap") else {}
        versions |= {system: found["versions"]} if "versions" in found else {}
        print(f"{system} is measured", flush=True)
    return {"rows": rows, "gaps": gaps, "peer_versions": versions}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a question file")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--questions", type=int, default=16, help="different ones; loads repeat them")
    parser.add_argument("--rounds", type=int, default=2, help=f"requests a user, but {FEWEST} a load at least")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests a second, open loop")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--kv-dir", type=Path, default=None, help="kept between runs; a temporary folder without it")
    parser.add_argument("--max-batched-rows", type=int, default=None, help="the engine's; by default after the machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "serving_cpu")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = arguments()
    kv_dir = args.kv_dir or Path(tempfile.mkdtemp(prefix="fused-kv-bench-"))
    options = {"kv_dir": kv_dir, "dtype": args.dtype, "memory_bytes": 4 * 2**30}
    with FusedKVEngine(args.model, max_batched_rows=args.max_batched_rows, **options) as engine:
        asked = Questions(args, engine)
        print(engine.build_kv_cache(asked.passages, preprocess="wait").summary())
        found = measure(args, engine, asked)
        stamp = environment()
        title = f"{args.model}, {engine.dtype}, {stamp['cores']} cores of {stamp['cpu']}"
        tokens = {"prompt": [len(ids) for ids in asked.ids(asked.prompts)], "long": len(asked.ids([asked.long])[0])}
    print_tables(found, title)
    result = {"environment": stamp, "model": args.model, "prompt_tokens": tokens, **found}
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1))
    draw(found, args.out.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
