"""Locust's users of a server; run by server_load.py in locust's own environment.

Each asks questions of `Prompts` one after another and writes what became of them to a file, a line each.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

from locust import User, constant, task
from server_clients import Prompts, ask

_PROMPTS = Prompts.load(Path(os.environ["FUSED_KV_LOAD_PROMPTS"]))
_NUMBERS = itertools.count(int(os.environ["FUSED_KV_LOAD_FIRST"]))
_OUT = Path(os.environ["FUSED_KV_LOAD_OUT"]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the end


class Asking(User):  # type: ignore[misc]
    """Asks, reads the answer, and asks again; waits a second after a refusal."""

    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        """Ask one question."""
        outcome = ask(self.host, _PROMPTS.body(next(_NUMBERS)))
        _OUT.write(json.dumps(outcome.to_dict()) + "\n")
        failed = None if outcome.kind == "answered" else RuntimeError(outcome.kind)
        self.environment.events.request.fire(
            request_type="POST", name="chat", response_time=1000 * outcome.seconds, response_length=outcome.tokens,
            exception=failed, context={},
        )  # fmt: skip
        if failed is not None:
            self._sleep(1)
