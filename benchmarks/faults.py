"""Requests under faults: how many get the right answer, how many a clear error, and what it took.

    python benchmarks/faults.py --data ../shared/data/squad10.jsonl

Every fault meets an engine that answers several requests at once, in float32. An answer is right if its tokens are
those of the undisturbed request, or of a full prefill where none of its chunks could be read. An answer from some of
its chunks is neither, and counted by itself. One request's steps always fail under ``step_raises``: it should get a
clear error.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from environment import environment
from evaluation.questions import read_questions
from torch import Tensor

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.kv import HostLevel, PrefixTree, RankedEviction
from fused_kv_llm.online import Generation
from fused_kv_llm.serving import RequestHandle, means
from fused_kv_llm.store.read.blocks import read_block

_LOAD_TIMEOUT_S = 2.0
_PREFIX_NBYTES = 2**30

# By request, the undisturbed answer and that of a full prefill.
_Right = list[tuple[Generation, Generation]]
Submit = Callable[[], list[RequestHandle]]
Fault = Callable[[FusedKVEngine, Submit], list[RequestHandle]]


def device_lost(engine: FusedKVEngine, submit: Submit) -> list[RequestHandle]:
    """Lose the device's KV while nobody is answered and while everybody is; the device is simulated."""
    host = HostLevel(_PREFIX_NBYTES, Tensor.clone, Tensor.clone)
    engine.requests.prefixes = PrefixTree(_PREFIX_NBYTES, RankedEviction("gdsf"), host)
    for handle in submit():
        handle.result()
    engine.requests.lose_device()
    handles = submit()
    for handle in handles[: len(handles) // 2]:
        handle.wait_for_first()
    engine.requests.lose_device()
    return handles


def loader_killed(engine: FusedKVEngine, submit: Submit) -> list[RequestHandle]:
    """End threads that load, in the midst of their reads."""
    dice = random.Random(0)

    def read(fd: int, target: memoryview, offset: int) -> None:
        if threading.current_thread().name.startswith("fused-kv-load") and dice.random() < 0.02:
            raise SystemExit("a thread that loads is told to end")
        read_block(fd, target, offset)

    engine.store.read_with(read)
    return submit()


def loader_hangs(engine: FusedKVEngine, submit: Submit) -> list[RequestHandle]:
    """Let no read come back before all requests have ended."""
    go = threading.Event()

    def hang(fd: int, target: memoryview, offset: int) -> None:
        go.wait()
        read_block(fd, target, offset)

    engine.store.read_with(hang)
    handles = submit()
    threading.Thread(target=lambda: (_wait(handles), go.set()), daemon=True).start()
    return handles


def _wait(handles: Sequence[RequestHandle]) -> None:
    while not all(handle.done for handle in handles):
        time.sleep(0.1)


def folder_gone(engine: FusedKVEngine, submit: Submit) -> list[RequestHandle]:
    """Delete the store's folder while requests are answered; those that come then find nothing."""
    before = submit()
    before[0].wait_for_first()
    shutil.rmtree(engine.store.kv_dir)
    handles = submit()
    for handle in before:
        handle.result()
    return handles


def step_raises(engine: FusedKVEngine, submit: Submit) -> list[RequestHandle]:
    """Have every fifth step fail, and every step of one request."""
    run, dice, cursed = means.forward_ragged, random.Random(0), list[Any]()

    def run_or_fail(loaded: Any, parts: Sequence[Any]) -> list[Tensor]:
        tokens = [part.cache.get_max_length() for part in parts]
        cursed.extend(tokens[:1] if not cursed else [])
        if cursed[0] in tokens or dice.random() < 0.2:
            raise MemoryError("no memory for this step")
        return run(loaded, parts)

    means.forward_ragged = run_or_fail  # type: ignore[assignment]
    return submit()


FAULTS: dict[str, Fault] = {
    fault.__name__: fault for fault in (device_lost, loader_killed, loader_hangs, folder_gone, step_raises)
}


def open_engine(model: Any, folder: Path, ratio: float) -> FusedKVEngine:
    """Open an engine that reads every chunk from the disk."""
    return FusedKVEngine(
        model, kv_dir=folder, dtype="float32", recompute_ratio=ratio, load_timeout_s=_LOAD_TIMEOUT_S,
        preprocessing="none", store_misses=False, memory_bytes=0, prefix_cache_bytes=0,
    )  # fmt: skip


@contextmanager
def copied(model: Any, stored: Path, ratio: float) -> Iterator[FusedKVEngine]:
    """Open an engine of a copy of a store's folder."""
    forward = means.forward_ragged
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "store"
        shutil.copytree(stored, copy)
        try:
            with open_engine(model, copy, ratio) as engine:
                yield engine
        finally:
            means.forward_ragged = forward  # type: ignore[assignment]


def outcome(handle: RequestHandle, undisturbed: Generation, full: Generation) -> tuple[str, Generation | None]:
    """Return how a request ended, and its answer."""
    try:
        got = handle.result()
    except FusedKVError:
        return "clear_errors", None
    except Exception:
        return "other_errors", None
    if got.report.chunks_missed == 0 and got.report.chunks_found > 0:
        return ("right" if got.token_ids == undisturbed.token_ids else "wrong"), got
    if got.report.chunks_found == 0:
        return ("right" if got.token_ids == full.token_ids else "wrong"), got
    return "some_chunks", got


def measure(fault: Fault, engine: FusedKVEngine, right: _Right, prompts: Sequence[str], most: int) -> dict[str, Any]:
    """Return the counts of one fault."""
    before, begun_s = replace(engine.requests.recovery), time.perf_counter()
    handles = fault(engine, lambda: [engine.submit(prompt, max_tokens=most) for prompt in prompts])
    found = [outcome(handle, *answers) for handle, answers in zip(handles, right, strict=True)]
    seconds, counts = time.perf_counter() - begun_s, engine.requests.recovery
    ends, reports = [end for end, _ in found], [got.report for _, got in found if got is not None]
    kinds = ("right", "wrong", "some_chunks", "clear_errors", "other_errors")
    return {
        "requests": len(prompts), **{kind: ends.count(kind) for kind in kinds},
        "retries": sum(report.retries for report in reports),
        "retries_of_the_engine": counts.retries - before.retries,
        "loads_given_up": counts.given_up_loads - before.given_up_loads,
        "requests_with_chunks_computed": sum(report.chunks_missed > 0 or not report.chunks_found for report in reports),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--out", type=Path, default=None, help="where the record is written; none by default")
    args = parser.parse_args()
    questions = read_questions(args.data, args.requests, args.passages)
    prompts = [question.prompt("instruct") for question in questions]
    passages = [text for question in questions for text in question.passages]
    result: dict[str, Any] = {"environment": environment(), "faults": {}}
    with tempfile.TemporaryDirectory() as folder:
        with open_engine(args.model, Path(folder), args.ratio) as engine:
            engine.build_kv_cache(passages, progress=False)
            options: dict[str, Any] = {"max_tokens": args.max_tokens}
            right = [(engine.generate(prompt, **options), engine.generate(prompt, recompute_ratio=1.0, **options))
                     for prompt in prompts]  # fmt: skip
            model = engine.loaded
        for name in args.faults:
            with copied(model, Path(folder), args.ratio) as engine:
                result["faults"][name] = measure(FAULTS[name], engine, right, prompts, args.max_tokens)
            print(name, json.dumps(result["faults"][name]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
