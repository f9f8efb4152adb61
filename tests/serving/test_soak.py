"""Nothing grows, leaks or answers otherwise over thousands of requests; ``make soak`` sends ten thousand."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .soaking import CLIENTS, TENANTS, State

pytestmark = pytest.mark.heavy

SOAK = os.environ.get("FUSED_KV_SOAK") == "1"
REQUESTS, ROUNDS, KILLS = (10_000, 20, 10) if SOAK else (240, 4, 2)
# What allocators keep of rounds that differ; a leak of one request's KV would be ten times as much.
GROWTH_BYTES = 48 * 2**20
# The main thread, the loop and its planners, and a few that read for each engine that is open; a dozen engines and
# more are closed.
MOST_THREADS = 20
EXIT_S = 15.0

CLIENT = """
import runpy, signal, sys, threading
from pathlib import Path
sys.path[:0] = {paths!r}
signal.signal(signal.SIGINT, signal.default_int_handler)
from soaking import Soak
soak = Soak(Path({folder!r}))
threading.Thread(target=soak.round, args=(0, 100_000), daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="looks at /proc")
def test_nothing_is_left_of_thousands_of_requests(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("soaking.py")), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [*program, str(ROUNDS), str(REQUESTS // ROUNDS)], stdout=subprocess.PIPE, env=environment, check=True
    )
    seen = json.loads(ran.stdout)
    states = [State(**state) for state in seen["states"]]
    print(seen["counts"], f"{seen['answers_compared']} answers are compared")
    assert seen["answers_compared"] >= 0.8 * REQUESTS / 50
    assert seen["answers_differing"] == []
    assert [state.caches for state in states] == [0] * ROUNDS
    assert [state.stores for state in states] == [len(TENANTS)] * ROUNDS
    # From the second quarter on, when everything was used once.
    warm = states[ROUNDS // 4 :]
    half = len(warm) // 2
    # Each thread has a connection to each store's index: some open theirs late. Dozens of engines were closed.
    most = max(state.open_files for state in states[:half])
    assert max(state.open_files for state in warm[half:]) <= most + 2 * CLIENTS * len(TENANTS)
    assert max(len(state.threads) for state in states) <= MOST_THREADS
    before, after = (statistics.median(state.rss_bytes for state in part) for part in (warm[:half], warm[half:]))
    assert after - before <= GROWTH_BYTES
    assert seen["unhandled"] == []
    assert not seen["model_locked"]


@pytest.mark.parametrize("number", range(KILLS))
def test_a_process_that_is_told_to_end_ends(tmp_path: Path, number: int) -> None:
    drawn = random.Random(number)
    paths = [str(Path(__file__).parent), *sys.path]
    code = CLIENT.format(paths=paths, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(drawn.uniform(0.0, 1.5))
    sent, asked_s = (signal.SIGINT, signal.SIGTERM)[number % 2], time.monotonic()
    process.send_signal(sent)
    try:
        _, errors = process.communicate(timeout=EXIT_S)
    finally:
        process.kill()
    print(f"{sent.name}: ended after {time.monotonic() - asked_s:.2f} s")
    assert process.returncode == -sent or "KeyboardInterrupt" in errors
