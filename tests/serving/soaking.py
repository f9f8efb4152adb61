"""Thousands of requests of every kind on a tiny model: what a soak sends, and what it looks at between its rounds.

Run as a program it soaks a store and writes what it saw as JSON: a process of its own holds nothing of other tests'.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import wait_until

from fused_kv_llm import FusedKVEngine, FusedKVWarning
from fused_kv_llm.errors import DeadlineError, EngineClosedError, QueueFullError, RequestCancelledError
from fused_kv_llm.model import FusedCache, ViewCache
from fused_kv_llm.store import KVStore

__all__ = ["Soak", "State"]

# Chunks whose files are whole throughout, and chunks that get damaged and ingested again.
STABLE, FRAGILE = SHORT[:6], SHORT[6:8]
TENANTS = ("first", "second", "third")
CLIENTS, CHECKED_OF = 4, 50
# What a request may end in besides an answer.
ENDS = (DeadlineError, QueueFullError, RequestCancelledError, EngineClosedError)
PATIENCE_S = 60.0


@dataclass(frozen=True)
class State:
    """What the process holds while no request runs."""

    rss_bytes: int
    open_files: int
    threads: list[str]
    caches: int
    stores: int


@dataclass(frozen=True)
class _Checked:
    """An answer that is compared with the one that its prompt gets alone."""

    tenant: int
    prompt: str
    options: dict[str, Any]
    token_ids: list[int]
    text: str


@dataclass
class Soak:
    """Engines of three tenants on one model, and clients that ask them all kinds of things.

    Parameters
    ----------
    folder : Path
        For the store.
    """

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    states: list[State] = field(default_factory=list)
    checked: list[_Checked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self._damaging = tiny_model(), threading.Lock()
        self.engines = [self._engine(tenant) for tenant in TENANTS]
        for engine in self.engines:
            engine.build_kv_cache([*STABLE, *FRAGILE], progress=False)

    def _engine(self, tenant: str) -> FusedKVEngine:
        # The answers of one tenant share the KV of their chunks.
        sharing = "always" if tenant == TENANTS[0] else "auto"
        options = {"dtype": "float32", "preprocessing": "none", "recompute_ratio": 0.3, "store_misses": False}
        limits = {"max_num_seqs": 8, "max_queued": 16, "max_batched_rows": 48, "memory_bytes": 2**20,
                  "prefix_cache_bytes": 0}  # fmt: skip
        return FusedKVEngine(
            self.model,
            tokenizer=smollm2_tokenizer(),
            kv_dir=self.folder,
            tenant=tenant,
            share_chunk_kv=sharing,
            **options,
            **limits,
        )

    def close(self) -> None:
        """Close the engines."""
        for engine in self.engines:
            engine.close()

    def round(self, first: int, count: int) -> None:
        """Send the requests of these numbers from several clients, an engine closing and a file damaged meanwhile."""
        numbers = range(first, first + count)
        with ThreadPoolExecutor(CLIENTS + 1) as clients:
            ran = [clients.submit(self._client, numbers[client::CLIENTS]) for client in range(CLIENTS)]
            ran.append(clients.submit(self._disturb, random.Random(first)))
            for one in ran:
                one.result()
        wait_until(lambda: self._loop._open == 0)
        self.states.append(self._state())

    def answers_that_differ(self) -> list[_Checked]:
        """Return which of the noted answers are others when their prompts are asked alone."""
        differing = []
        for one in self.checked:
            alone = self.engines[one.tenant].generate(one.prompt, **one.options)
            if (alone.token_ids, alone.text) != (one.token_ids, one.text):
                differing.append(one)
        return differing

    # -- clients ---------------------------------------------------------------------------------------------

    def _client(self, numbers: range) -> None:
        drawn, rest = random.Random(numbers.start), list(numbers)
        while rest:
            # Now and then more at once than may wait.
            size = 30 if drawn.random() < 0.03 else drawn.randint(1, 6)
            burst, rest = rest[:size], rest[size:]
            asked = [one for number in burst if (one := self._ask(number)) is not None]
            for collect in asked:
                collect()

    def _ask(self, number: int) -> Any:
        """Submit a request; return what waits for its end."""
        drawn = random.Random(number)
        tenant, texts = drawn.randrange(len(TENANTS)), drawn.sample(STABLE, drawn.randint(0, 4))
        options: dict[str, Any] = {"max_tokens": drawn.randint(1, 16)}
        if drawn.random() < 0.5:
            options |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        if drawn.random() < 0.15:
            options["stop"] = drawn.choice("aeiost")
        is_checked = number % CHECKED_OF == 0
        if not is_checked and drawn.random() < 0.1:
            texts = [*texts, drawn.choice(FRAGILE)]
        prompt, terms = rag_prompt(texts, f"Question {number % 97}?"), {"priority": drawn.choice((0, 0, 0, 1, -1))}
        leaves = not is_checked and drawn.random() < 0.2
        if leaves:
            options["max_tokens"] = 400
        elif not is_checked and drawn.random() < 0.1:
            terms["timeout_s"] = drawn.uniform(0.001, 0.2)
        try:
            handle = self.engines[tenant].submit(prompt, **options, **terms)
        except QueueFullError:
            self.counts["QueueFullError"] += 1
            return None
        if leaves:
            return lambda: self._leave(handle, drawn)

        def collect() -> None:
            answer = self._end(handle)
            if is_checked and answer is not None:
                self.checked.append(_Checked(tenant, prompt, options, answer.token_ids, answer.text))

        return collect

    def _leave(self, handle: Any, drawn: random.Random) -> None:
        """Take some pieces, or none, and cancel the rest."""
        pieces = handle.pieces()
        for _ in range(drawn.randint(0, 4)):
            if next(pieces, None) is None:
                break
        handle.cancel()
        pieces.close()
        self.counts["left"] += 1

    def _end(self, handle: Any) -> Any:
        try:
            answer = handle.result()
        except ENDS as error:
            self.counts[type(error).__name__] += 1
            return None
        self.counts[answer.finish_reason] += 1
        self.counts["tokens"] += len(answer.token_ids)
        self.counts["with a missing chunk"] += bool(answer.report.chunks_missed)
        return answer

    # -- what else happens -----------------------------------------------------------------------------------

    def _disturb(self, drawn: random.Random) -> None:
        for _ in range(3):
            time.sleep(drawn.uniform(0.0, 0.3))
            self._damage(drawn)
            engine = self._engine(drawn.choice(TENANTS))
            handles = [engine.submit(rag_prompt(STABLE[:2]), max_tokens=200) for _ in range(drawn.randint(1, 3))
                       if self._loop._open < 16]  # fmt: skip
            time.sleep(drawn.uniform(0.0, 0.1))
            started = time.monotonic()
            engine.close()
            assert time.monotonic() - started < PATIENCE_S
            for handle in handles:
                self._end(handle)
            self.counts["engines closed"] += 1

    def _damage(self, drawn: random.Random) -> None:
        """Flip a byte of a chunk's file, and store it again a little later."""
        engine, text = drawn.choice(self.engines), drawn.choice(FRAGILE)
        found = engine.chunk_id(text)
        for path in self.folder.rglob("*"):
            if found is not None and found in path.name and path.is_file():
                data = bytearray(path.read_bytes())
                data[-drawn.randint(1, 2000)] ^= 0xFF
                path.write_bytes(data)
                self.counts["files damaged"] += 1
        engine.store.drop_memory()
        time.sleep(drawn.uniform(0.0, 0.2))
        engine.build_kv_cache([text], progress=False)

    # -- what is held ----------------------------------------------------------------------------------------

    @property
    def _loop(self) -> Any:
        return self.engines[0].requests._loop

    def _state(self) -> State:
        gc.collect()
        # What is free in the allocator's arenas, too many threads' to be told from a leak, is given back.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)(0)
        held = [
            thing for thing in gc.get_objects() if type(thing) in (FusedCache, ViewCache) and thing._buffer is not None
        ]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads = sorted(thread.name for thread in threading.enumerate())
        stores = sum(type(thing) is KVStore for thing in gc.get_objects())
        return State(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threads, len(held), stores)


def _soak(folder: Path, rounds: int, round_requests: int) -> dict[str, Any]:
    """Soak a store in so many rounds; return what was seen."""
    unhandled = list[str]()
    threading.excepthook = lambda args: unhandled.append(repr(args.exc_value))
    sys.unraisablehook = lambda args: unhandled.append(repr(args.exc_value))
    # As in other tests; damaged files are warned about.
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", FusedKVWarning)
    soak, started_s = Soak(folder), time.monotonic()
    for number in range(rounds):
        soak.round(number * round_requests, round_requests)
        print(f"{time.monotonic() - started_s:.0f} s: {soak.states[-1]}", file=sys.stderr, flush=True)
    differing = soak.answers_that_differ()
    soak.close()
    return {
        "counts": soak.counts,
        "states": [asdict(state) for state in soak.states],
        "answers_compared": len(soak.checked),
        "answers_differing": [asdict(one) for one in differing],
        "unhandled": unhandled,
        "model_locked": soak.engines[0].model_lock.locked(),
    }


if __name__ == "__main__":
    # A soak that hangs says where, before its test gives up.
    faulthandler.dump_traceback_later(3500.0 if os.environ.get("FUSED_KV_SOAK") == "1" else 540.0)
    json.dump(_soak(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), sys.stdout)
