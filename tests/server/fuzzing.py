"""Requests that schemathesis makes up from the server's own OpenAPI schema: no error of the server's, no untrue schema.

    python tests/server/fuzzing.py build/fuzz/bin/schemathesis --requests 10000

The model is a tiny random one with a short context. What is answered must be as the schema says: status, type of
content, fields.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
from fastapi import FastAPI
from models import smollm2_tokenizer, tiny_model
from server.running import running
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

# Not: what the schema lets pass need not be answerable (a model of another name), nor the reverse.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


class Counted:
    """Counts requests by path and status."""

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, int]]) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[f"{scope['method']} {scope.get('route') and scope['route'].path}", message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)


def operations(app: FastAPI) -> int:
    """Return how many operations the schema has."""
    return sum(len(methods) for methods in app.openapi()["paths"].values())


def made_reachable(app: FastAPI, url: str) -> None:
    """Have the schema name the model, a document, its job and a request that are there; made-up names end at 404."""
    upload = {"text": "The ferry leaves at nine. " * 20, "name": "ferries"}
    with httpx.Client(base_url=url, timeout=60) as client:
        made = client.post("/v1/documents", json=upload).json()
        wait_until(lambda: client.get(f"/v1/jobs/{made['job_id']}").json()["state"] == "done", timeout_s=60)
        hello = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        answer = client.post("/v1/chat/completions", json=hello).json()
    ids = {"documents": made["id"], "jobs": made["job_id"], "requests": answer["id"]}
    schema = app.openapi()
    for body in ("ChatRequest", "CompletionRequest", "TokenizeRequest"):
        schema["components"]["schemas"][body]["properties"]["model"] = {"type": "string", "enum": ["tiny"]}
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            for parameter in about.get("parameters", ()):
                known = ids.get(path.split("/")[2]) if parameter["name"] == "id_" else None
                # What is deleted is not there for the others.
                if known is not None and method != "delete":
                    parameter["schema"] = {"enum": [known, "another"]}
    app.openapi_schema = schema


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("schemathesis", type=Path)
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="paths; all by default")
    parser.add_argument("--failures", type=int, default=20, help="the run ends after so many")
    args = parser.parse_args()
    counts: Counter[tuple[str, int]] = Counter()
    model = tiny_model(max_position_embeddings=256)
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False, "max_queued": 64}
    with ExitStack() as entered:
        folder = entered.enter_context(tempfile.TemporaryDirectory())
        with FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as engine:
            config = ServerConfig(model_name="tiny", max_answer_tokens=4)
            app = create_app(engine, config)
            app.add_middleware(Counted, counts=counts)
            only = [part for path in args.only for part in ("--include-path", path)]
            each = -(-args.requests // (len(args.only) or operations(app)))
            with running(app, config) as url:
                made_reachable(app, url)
                command = [
                    args.schemathesis.resolve(), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), *only,
                    "--phases", "coverage,fuzzing", "--max-examples", str(each), "--seed", str(args.seed),
                    "--continue-on-failure", "--max-failures", str(args.failures), "--no-shrink",
                    "--suppress-health-check", "all", "--request-timeout", "60",
                ]  # fmt: skip
                status = subprocess.run([*map(str, command)], check=False, cwd=folder).returncode
    for (what, code), count in sorted(counts.items()):
        print(f"{count:6d}  {code}  {what}")
    total = sum(counts.values())
    wrong = {f"{what}: {code}": count for (what, code), count in counts.items() if code >= 500}
    print(f"{total} requests; with an error of the server's own: {json.dumps(wrong)}")
    if status or wrong or (not args.only and total < args.requests):
        sys.exit(f"schemathesis ended with status {status}")


if __name__ == "__main__":
    main()
