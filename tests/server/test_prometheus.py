"""A real Prometheus scrapes the server, and answers queries over what it says (Debian: prometheus)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
from services import free_port, missing, server
from waiting import wait_until

CONFIG = """
global: {{scrape_interval: 200ms}}
scrape_configs:
  - job_name: fused_kv
    static_configs: [{{targets: ["{target}"]}}]
"""


def test_what_was_asked_can_be_queried(url: str, client: httpx.Client, tmp_path: Path) -> None:
    program = shutil.which("prometheus") or missing("prometheus is not installed")
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(target=url.removeprefix("http://")), encoding="utf-8")
    port = free_port()
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with server([program, *options], port), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as asking:

        def value(query: str) -> float | None:
            response = asking.get("/api/v1/query", params={"query": query})
            found: list[dict[str, Any]] = response.json()["data"]["result"] if response.status_code == 200 else []
            return float(found[0]["value"][1]) if found else None

        wait_until(lambda: value("up") == 1.0, 60)
        names = (
            "vllm:generation_tokens_total",
            "sum(vllm:request_success_total)",
            "vllm:time_to_first_token_seconds_count",
        )
        before = [value(name) or 0.0 for name in names]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        used = client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"]
        for name, old, more in zip(names, before, (used, 1, 1), strict=True):
            wait_until(lambda name=name, want=old + more: value(name) == want, 30)
        # It keeps their types and descriptions.
        described = asking.get("/api/v1/metadata").json()["data"]
        assert described["vllm:time_to_first_token_seconds"][0]["type"] == "histogram"
        # The dashboard's queries are understood.
        board = json.loads((Path(__file__).parents[2] / "examples/server/grafana.json").read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m")
                assert asking.get("/api/v1/query", params={"query": query}).json()["status"] == "success"
