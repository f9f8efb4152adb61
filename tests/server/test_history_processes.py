"""Two processes that serve from one folder have one request log."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from fused_kv_llm.server.history import History

ROWS = 200
TIMEOUT_S = 120.0

# A process adds its rows, reads all of them and sweeps meanwhile; each of its old rows is to go, no other.
PROCESS = """
import json, sys, time
from pathlib import Path

from fused_kv_llm.server.history import History
from fused_kv_llm.server.history_schema import RequestRecord

folder, name, rows = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
history = History(folder, 86400.0, 2**26)
print("ready", flush=True)
sys.stdin.readline()
seen, lost = set(), []
for number in range(rows):
    for id_, age_s in ((f"{name}-{number}", 0.0), (f"{name}-old-{number}", 2 * 86400.0)):
        record = RequestRecord(id_, "", "", time.time() - age_s, "/v1", detail={"answer": "word " * 50})
        history.add(lambda record=record: record, 100)
    if number % 10 == 0:
        history.sweep()
    if number % 25 == 0:
        found = {row["id"] for row in history.summaries("", 10 * rows) if "old" not in row["id"]}
        lost += sorted(seen - found)
        seen |= found
history.sweep()
history.close()
print(json.dumps({"lost": lost, "others": sum(not one.startswith(name) for one in seen)}))
"""


def test_two_processes_have_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    arguments = [[sys.executable, "-c", PROCESS, str(folder), name, str(ROWS)] for name in ("one", "two")]
    processes = [
        subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for each in arguments
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    # Nothing is logged unless the file could not be used.
    assert [errors for _, errors in said] == ["", ""]
    found = [json.loads(output) for output, _ in said]
    assert [one["lost"] for one in found] == [[], []]
    assert any(one["others"] for one in found), "the processes did not run at once"
    with closing(History(folder, 86400.0, 2**26)) as history:
        history.sweep()
        kept = [row["id"] for row in history.summaries("", 10 * ROWS)]
    assert sorted(kept) == sorted(f"{name}-{number}" for name in ("one", "two") for number in range(ROWS))
