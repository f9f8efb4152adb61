"""A server under load: errors, times, memory, its throughput beside the engine's own, and signals in the midst of it.

    make load                       # the environment of locust, then all of it: four stages of ten minutes
    python benchmarks/server_load.py --duration 30

`fused-kv serve` runs in a process of its own, with SmolLM2 and the demo's handbook as its documents. A stage has
locust's users ask one question after another, each with chunks of the handbook that are drawn anew. Throughput is
compared in rounds that alternate: the same questions by so many threads, to the server and to an engine in this
process. What is measured is kept in the record after every stage, and not measured again: `--again` forgets it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environment import environment
from server_clients import Outcome, Prompts, Users, ask, json_of, summary
from server_process import RSSWatch, check_store, ingest, serving

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_folder
from fused_kv_llm.prompt import ChatPrompt

_HERE = Path(__file__).resolve().parent
_BOUND = 0.95
_AT_ONCE = 16
_LEFT_BY_WRITES = {"temporary", "orphaned", "missing"}


def _documents(most: int) -> list[Path]:
    return sorted(handbook_folder().glob("*.*"))[:most]


def _flags(options: dict[str, Any]) -> list[str]:
    """Return options of an engine as the command takes them."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return [part for flag, value in flags.items() for part in ([flag] if value is True else [flag, str(value)])]


class Bench:
    """The options, a store with the handbook, and the questions about it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.options: dict[str, Any] = {"model": args.model, **json.loads(args.engine_options)}
        self.kv_dir, self._next = folder / "kv", 0
        self.texts = {path.name: path.read_text(encoding="utf-8") for path in _documents(args.documents)}
        with self.server() as (_, url):
            chunks, model = ingest(url, self.texts), json_of(url, "/v1/models")["data"][0]["id"]
        self.prompts = Prompts(chunks, args.chunks, args.max_tokens, model)
        self.prompts.save(folder / "prompts.json")

    @contextmanager
    def server(self) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """Run the server on this store."""
        with serving(self.kv_dir, self.folder / "log", _flags(self.options)) as found:
            yield found

    def new(self, count: int) -> int:
        """Return the number of the first of so many questions that nobody has asked."""
        self._next += count
        return self._next - count


def stage(bench: Bench, process: subprocess.Popen[bytes], url: str, users: int) -> dict[str, Any]:
    """Have locust's users ask for as long as the options say."""
    out = bench.folder / f"outcomes-{users}.jsonl"
    seconds = bench.args.duration
    variables = {"FUSED_KV_LOAD_PROMPTS": bench.folder / "prompts.json", "FUSED_KV_LOAD_OUT": out,
                 "FUSED_KV_LOAD_FIRST": bench.new(10**6)}  # fmt: skip
    command = [bench.args.locust, "-f", _HERE / "server_users.py", "--headless", "-u", users, "-r", users,
               "-t", f"{seconds}s", "--host", url, "--stop-timeout", 600, "--only-summary"]  # fmt: skip
    watch, began_s = RSSWatch(process.pid), time.time()
    done = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(_HERE), **{name: str(value) for name, value in variables.items()}},
    )  # fmt: skip
    memory = watch.stop()
    if not out.exists() or not out.stat().st_size:
        raise RuntimeError(f"No user has asked anything:\n{done.stdout}\n{done.stderr}")
    outcomes = [Outcome(**json.loads(line)) for line in out.read_text(encoding="utf-8").splitlines()]
    wall_s = max(one.began_s + one.seconds for one in outcomes) - began_s
    return {"seconds": seconds, **summary(outcomes, wall_s), **memory}


def throughput(bench: Bench, url: str, engine: FusedKVEngine, users: int) -> dict[str, Any]:
    """Compare tokens a second of the server and of an engine, in rounds that alternate."""

    def of_engine(number: int) -> Outcome:
        started, outcome = time.perf_counter(), Outcome(200, time.time(), complete=True)
        prompt = ChatPrompt([{"role": "user", "content": bench.prompts.content(number)}])
        for piece in engine.submit(prompt, max_tokens=bench.args.max_tokens, temperature=0.0).pieces():
            outcome.first_s = outcome.first_s or time.perf_counter() - started
            if piece.report is not None:
                outcome.tokens = piece.report.completion_tokens
        outcome.seconds = time.perf_counter() - started
        return outcome

    def of_server(number: int) -> Outcome:
        return ask(url, bench.prompts.body(number))

    rounds: list[dict[str, float]] = []
    most = max(16, 2 * users)
    for number in range(bench.args.rounds + 1):
        first, found = bench.new(most), {}
        both = [("server", of_server), ("engine", of_engine)]
        for name, do in both if number % 2 else reversed(both):
            began_s = time.perf_counter()
            outcomes = Users(users, do, first, most).wait()
            found[name] = sum(one.tokens for one in outcomes) / (time.perf_counter() - began_s)
        if number:  # the first warms both
            rounds.append(found)
    ratios = [one["server"] / one["engine"] for one in rounds]
    return {
        "requests_of_a_round": most,
        "engine_tokens_per_s": round(statistics.median(one["engine"] for one in rounds), 2),
        "server_tokens_per_s": round(statistics.median(one["server"] for one in rounds), 2),
        "share_of_the_engine": round(statistics.median(ratios), 4),
        "shares": [round(one, 3) for one in ratios],
        "bound": _BOUND,
    }


def sigterm(bench: Bench) -> dict[str, Any]:
    """Tell a server under load to end: streams that have begun end by themselves, others hear when to ask again."""
    with bench.server() as (process, url):
        users = Users(_AT_ONCE, lambda number: ask(url, bench.prompts.body(number)), bench.new(10**6))
        time.sleep(bench.args.before_signal)
        told_s = time.time()
        process.send_signal(signal.SIGTERM)
        status, seconds = process.wait(timeout=600), time.time() - told_s
        outcomes = users.stop()
    refused = [one for one in outcomes if one.status == 503]
    later = [one for one in outcomes if one.kind == "answered" and one.began_s + one.seconds > told_s]
    return {
        "answered": sum(one.kind == "answered" for one in outcomes),
        "ended_after_the_signal": len(later),
        "broken_off": sum(one.kind == "broken_off" for one in outcomes),
        "refused": len(refused),
        "refused_without_retry_after": sum(not one.retry_after for one in refused),
        "no_connection_before_the_signal": sum(one.status == 0 and one.began_s < told_s for one in outcomes),
        "exit_status": status,
        "seconds_to_end": round(seconds, 2),
    }


def sigkill(bench: Bench) -> dict[str, Any]:
    """Kill a server under load, with uploads under way; no chunk is damaged, and the next server goes on."""
    with bench.server() as (process, url):
        users = Users(_AT_ONCE, lambda number: ask(url, bench.prompts.body(number)), bench.new(10**6))
        time.sleep(bench.args.before_signal)
        for name, text in bench.texts.items():
            json_of(url, "/v1/documents", {"name": name, "text": f"Second edition.\n\n{text}".replace("ferry", "boat")})
        process.kill()  # at once: uploads are under way on a machine of any speed
        process.wait()
        users.stop()
    found = re.findall(r"^│ (\w[\w ]*?) +│", check_store(bench.kv_dir)[1], re.MULTILINE)
    check_store(bench.kv_dir, "--fix")
    status, told = check_store(bench.kv_dir)
    with bench.server() as (_, url):
        states = [job["state"] for job in json_of(url, "/v1/jobs?limit=100")["data"]]
        after = ask(url, bench.prompts.body(bench.new(1)))
    return {
        # A write that was cut off leaves one of these at most (docs/store.md).
        "left_by_writes": dict(Counter(kind for kind in found if kind in _LEFT_BY_WRITES)),
        "damage": sorted(set(found) - _LEFT_BY_WRITES),
        "check_exit_status": status,
        "check_says": told.strip().splitlines()[-3:],
        "jobs_interrupted": states.count("interrupted"),
        "jobs_done": states.count("done"),
        "answered_by_the_next_server": after.kind,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--duration", type=int, default=600, help="seconds of each stage")
    parser.add_argument("--rounds", type=int, default=6, help="of the comparison with the engine, for each stage")
    parser.add_argument("--documents", type=int, default=100, help="most files of the handbook")
    parser.add_argument("--chunks", type=int, default=3, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--engine-options", default="{}", help="a JSON object, for the server and for the engine")
    parser.add_argument("--before-signal", type=float, default=10.0, help="seconds of load before a signal")
    parser.add_argument("--locust", type=Path, default=_HERE.parent / "build/load/bin/locust")
    parser.add_argument("--only", nargs="+", choices=["load", "throughput", "sigterm", "sigkill"], default=None)
    parser.add_argument("--out", type=Path, default=_HERE / "results/server_load_cpu.json")
    parser.add_argument("--again", action="store_true", help="measure what the record has already")
    args = parser.parse_args()
    only = args.only or ["load", "throughput", "sigterm", "sigkill"]
    record: dict[str, Any] = {"environment": environment()}
    if args.out.exists() and not args.again:
        record |= json.loads(args.out.read_text(encoding="utf-8"))

    def keep(kind: str, name: str, found: dict[str, Any]) -> None:
        record.setdefault(kind, {})[name] = found
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(kind, name, json.dumps(found), flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bench = Bench(args, Path(folder))
        wanted = {
            kind: [users for users in args.users if kind in only and str(users) not in record.get(kind, {})]
            for kind in ("load", "throughput")
        }
        with bench.server() as (process, url):
            for users in wanted["load"]:
                keep("load", str(users), stage(bench, process, url, users))
            if wanted["throughput"]:
                with FusedKVEngine(**bench.options, kv_dir=bench.kv_dir) as engine:
                    for users in wanted["throughput"]:
                        keep("throughput", str(users), throughput(bench, url, engine, users))
        for kind, run in (("sigterm", sigterm), ("sigkill", sigkill)):
            if kind in only and kind not in record.get("signals", {}):
                keep("signals", kind, run(bench))


if __name__ == "__main__":
    main()
