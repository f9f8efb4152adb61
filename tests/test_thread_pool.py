"""OpenMP's workers end with what they were started for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, time, torch
from fused_kv_llm.thread_pool import release_openmp_workers

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
release_openmp_workers()  # there are none yet
before = threads()
want = torch.ones(3_000_000).exp_().sum()
assert threads() == before + 2, threads() - before
release_openmp_workers()
for _ in range(200):
    if threads() == before:
        break
    time.sleep(0.01)
assert threads() == before, threads() - before
assert torch.ones(3_000_000).exp_().sum() == want
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_workers_end_and_come_back() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


FORKING = """
import os, torch
from fused_kv_llm.thread_pool import release_openmp_workers

torch.set_num_threads(3)
want = torch.ones(3_000_000).exp_().sum()
child = os.fork()
if not child:
    release_openmp_workers()
    os._exit(0 if torch.ones(3_000_000).exp_().sum() == want else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.ones(3_000_000).exp_().sum() == want
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_forked_process_waits_for_no_workers_of_its_parent() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", FORKING], env=environment, check=True, timeout=60)
