"""``fused-kv serve`` as a process: it is there when it says so, and ends what it has begun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from models import smollm2_tokenizer, tiny_model
from server.running import events
from typer.testing import CliRunner
from waiting import wait_until

from fused_kv_llm.cli import app

CODE = "import sys; from fused_kv_llm.cli import app; app(sys.argv[1:])"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    model, log = tmp_path / "tiny", tmp_path / "log"
    tiny_model().save_pretrained(model)
    smollm2_tokenizer().save_pretrained(model)
    command = ["serve", "--model", str(model), "--kv-dir", str(tmp_path / "kv"), "--preprocessing", "none"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with log.open("w") as written:
        options = [
            "--port",
            "0",
            "--model-name",
            "tiny",
            "--trust-probe",
            "--max-num-seqs",
            "1",
            "--log-format",
            "json",
        ]
        made = subprocess.Popen(
            [sys.executable, "-c", CODE, *command, *options], stdout=written, stderr=written, text=True, env=environment
        )
        try:
            yield made, log
        finally:
            made.kill()
            made.wait()


def is_refused(url: str) -> bool:
    """Whether nobody listens; a connection that was not accepted before the listener closed is reset, not refused."""
    try:
        with suppress(httpx.ReadError):
            httpx.get(f"{url}/ready")
    except httpx.ConnectError:
        return True
    return False


def test_running_answers_end_and_no_more_begin(process: tuple[subprocess.Popen[str], Path]) -> None:
    made, log = process
    wait_until(lambda: "Uvicorn running on" in log.read_text() or made.poll() is not None, timeout_s=120)
    found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
    assert found, log.read_text()
    wait_until(lambda: f"Open {found[0]}/ in a browser" in log.read_text())
    with ExitStack() as entered:
        client, other = (entered.enter_context(httpx.Client(base_url=found[0], timeout=60)) for _ in range(2))
        threads = entered.enter_context(ThreadPoolExecutor())
        assert client.get("/ready").status_code == other.get("/ready").status_code == 200
        body = {**HELLO, "model": "tiny", "max_tokens": 1500, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            raw = response.iter_raw()
            begun = next(raw)
            asked = {**HELLO, "model": "tiny"}
            queued = threads.submit(httpx.post, f"{found[0]}/v1/chat/completions", json=asked, timeout=60)
            gauges = ("vllm:num_requests_running 1.0", "vllm:num_requests_waiting 1.0")
            wait_until(lambda: all(gauge in other.get("/metrics").text for gauge in gauges))
            made.send_signal(signal.SIGTERM)
            wait_until(lambda: is_refused(found[0]))
            # Who waits is told while the answer that has begun goes on.
            refusal = queued.result()
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "shutting_down")
            assert int(refusal.headers["Retry-After"]) > 0
            # A connection that was open before is told, or closed.
            with suppress(httpx.TransportError):
                assert other.post("/v1/chat/completions", json={**HELLO, "model": "tiny"}).status_code == 503
            text = b"".join([begun, *raw]).decode()
    assert events(text)[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    assert made.wait(timeout=60) in (0, -signal.SIGTERM)
    text = log.read_text()
    assert "Traceback" not in text
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (refused,) = [line for line in lines if line.get("request_id") == refusal.headers["x-request-id"]]
    assert (refused["status"], refused["path"], refused["method"]) == (503, "/v1/chat/completions", "POST")
    assert "Hello" not in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", "0.0.0.0"], "keys are needed"),
        (["--api-key", "short"], "shorter than 16"),
        (["--api-key", "one-key-of-sixteen-characters", "--api-key", "another-of-sixteen-characters"], "two keys"),
        (["--port", "70000"], "port"),
        (["--log-format", "xml"], "log_format"),
        (["--requests-per-minute", "sales=60"], "no keys of these tenants"),
        (["--tokens-per-minute", "many"], "quotas.default.tokens_per_minute"),
        (["--tokens-per-minute", "60", "--tokens-per-minute", "70"], "has a number already"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_model_is_loaded(options: list[str], told: str) -> None:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["serve", "--model", "/nowhere", *options])
    assert done.exit_code == 1
    assert told in done.output
