"""How soon an installed wheel answers over the demo's handbook: `fused-kv serve`, uploads, a question; no network.

python -I first_answer.py [seconds]

It fails if that takes more than so many seconds (120). Where the system lets it (Linux, `unshare`), all of it runs in a
namespace without any network but its own loopback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

QUESTION = "Which ships does the company have?"
_INSIDE = "FUSED_KV_WITHOUT_NETWORK"


def main() -> None:
    """Measure it."""
    if _INSIDE not in os.environ and _can_unshare():
        command = [
            "unshare",
            "-rn",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
            sys.executable,
            *sys.orig_argv[1:],
        ]
        sys.exit(subprocess.run(command, check=False, env={**os.environ, _INSIDE: "1"}).returncode)
    bound_s = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    print("without a network" if _INSIDE in os.environ else "with a network: unshare does not work here")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSED_KV_CACHE"] = f"{folder}/cache"
        seconds = measure(Path(folder))
    print(", ".join(f"{name} after {moment_s:.1f} s" for name, moment_s in seconds.items()))
    if seconds["answered"] > bound_s:
        sys.exit(f"The first answer took longer than {bound_s:g} s")


def measure(folder: Path) -> dict[str, float]:
    """Return when the server was there, the handbook ingested, and the question answered: seconds since the start."""
    command = [Path(sys.executable).parent / "fused-kv", "serve", "--kv-dir", folder / "kv", "--port", "0"]
    began_s, log, seconds = time.perf_counter(), folder / "log", {}
    with log.open("w") as written:
        process = subprocess.Popen([str(part) for part in command], stdout=written, stderr=written, cwd=folder)
    try:
        while (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())) is None:
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.05)
        seconds["served"] = time.perf_counter() - began_s
        upload(found[0])
        seconds["ingested"] = time.perf_counter() - began_s
        answer = ask(found[0])
        seconds["answered"] = time.perf_counter() - began_s
    finally:
        process.kill()
        process.wait()
    print(f"{QUESTION}\n{answer['choices'][0]['message']['content']}")
    if not answer["usage"]["prompt_tokens_details"]["cached_tokens"]:
        sys.exit("Nothing of the answer's prompt was reused")
    return seconds


def upload(url: str) -> None:
    """Upload the handbook's files and wait until they are ingested."""
    handbook = subprocess.run(
        [sys.executable, "-I", "-c", "from fused_kv_llm.demo import handbook_folder; print(handbook_folder())"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(handbook).iterdir()) if path.is_file()}
    made = [_json(f"{url}/v1/documents", {"name": name, "text": text}) for name, text in texts.items()]
    for one in made:
        while (state := _json(f"{url}/v1/jobs/{one['job_id']}")["state"]) != "done":
            if state in ("failed", "cancelled", "interrupted"):
                sys.exit(f"The ingestion of {one['name']} has {state}")
            time.sleep(0.2)


def ask(url: str) -> dict[str, Any]:
    """Ask one question, to be answered from the handbook."""
    body = {"model": _json(f"{url}/v1/models")["data"][0]["id"], "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 48, "temperature": 0, "fused_kv": {"retrieve": {"k": 4}}}  # fmt: skip
    return _json(f"{url}/v1/chat/completions", body)


def _json(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        found: dict[str, Any] = json.loads(response.read())
    return found


def _can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    command = ["unshare", "-rn", "ip", "link", "set", "lo", "up"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
