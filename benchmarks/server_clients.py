"""Users of a server in a process of its own: what they ask, what became of it, and the server's process.

Nothing here needs more than Python, so that users in another environment (locust's) are the same code.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Outcome", "Prompts", "Users", "ask", "json_of", "summary"]

_TIMEOUT_S = 600.0


@dataclass
class Outcome:
    """What became of one request.

    Parameters
    ----------
    status : int
        Of HTTP; 0 where there was no connection, or it was lost before the status came.
    began_s, first_s, seconds : float, float or None, float
        Seconds since 1970; to the first text; to the end.
    tokens : int
        Of the answer.
    complete : bool
        Whether a stream has a reason to end, and ``[DONE]``.
    retry_after : bool
        Whether a refusal says when to ask again.
    """

    status: int
    began_s: float
    first_s: float | None = None
    seconds: float = 0.0
    tokens: int = 0
    complete: bool = False
    retry_after: bool = False

    @property
    def kind(self) -> str:
        """How it ended, in a word."""
        if self.status == 200:
            return "answered" if self.complete else "broken_off"
        return str(self.status) if self.status else "no_connection"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def ask(url: str, body: dict[str, Any], on_first: Callable[[], None] | None = None) -> Outcome:
    """Ask for a streamed answer and read it to its end.

    Parameters
    ----------
    url : str
        Of the server.
    body : dict
        Of ``/v1/chat/completions``.
    on_first : callable or None
        Called when the first text has come.
    """
    started, outcome = time.perf_counter(), Outcome(0, time.time())
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_TIMEOUT_S)
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
    try:
        connection.request("POST", "/v1/chat/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        outcome.status, outcome.retry_after = response.status, response.getheader("Retry-After") is not None
        if response.status == 200:
            _read(response, outcome, started, on_first)
        else:
            response.read()
    except (OSError, http.client.HTTPException):
        pass  # the outcome says so: no status, or a stream without its end
    finally:
        connection.close()
    outcome.seconds = time.perf_counter() - started
    return outcome


def _read(
    response: http.client.HTTPResponse, outcome: Outcome, started: float, on_first: Callable[[], None] | None
) -> None:
    ended = False
    for line in response:
        if line == b"data: [DONE]\n":
            outcome.complete = ended
        elif line.startswith(b"data: "):
            chunk = json.loads(line[6:])
            if (usage := chunk.get("usage")) is not None:
                outcome.tokens = usage["completion_tokens"]
            for choice in chunk.get("choices", ()):
                ended = ended or choice["finish_reason"] is not None
                if choice["delta"].get("content") and outcome.first_s is None:
                    outcome.first_s = time.perf_counter() - started
                    if on_first is not None:
                        on_first()


def json_of(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return what the server answers, read as JSON."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_TIMEOUT_S)
    try:
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


class Prompts:
    """Questions about chunks that are drawn from a corpus: the same for the same number.

    Parameters
    ----------
    chunks : sequence of str
        Whose KV is stored.
    each : int
        Chunks of a prompt.
    max_tokens : int
    model : str
    """

    def __init__(self, chunks: Sequence[str], each: int, max_tokens: int, model: str) -> None:
        self._chunks, self._each = list(chunks), each
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": 0}

    def content(self, number: int) -> str:
        """Return what a user says."""
        found = random.Random(number).sample(self._chunks, self._each)
        return "\n\n".join([*found, f"Question {number}: what do these passages say about the company and its ships?"])

    def body(self, number: int) -> dict[str, Any]:
        """Return a request's body."""
        return {**self._options, "messages": [{"role": "user", "content": self.content(number)}]}

    def save(self, path: Path) -> None:
        """Write them for users in another process."""
        path.write_text(json.dumps([self._chunks, self._each, self._options]), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Prompts:
        """Read what was saved."""
        chunks, each, options = json.loads(path.read_text(encoding="utf-8"))
        return cls(chunks, each, options["max_tokens"], options["model"])


class Users:
    """Users who ask one question after another until they are told to stop; each is a thread.

    Parameters
    ----------
    count : int
    do : callable
        Takes the number of the question and returns its outcome.
    first : int
        Number of the first question.
    most : int or None
        How many questions there are; None asks until :meth:`stop`.
    """

    def __init__(self, count: int, do: Callable[[int], Outcome], first: int = 0, most: int | None = None) -> None:
        self._do, self._next, self._end = do, first, None if most is None else first + most
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self.outcomes: list[Outcome] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        """Ask no more, and return what became of everything when it has ended."""
        self._stopped.set()
        return self.wait()

    def wait(self) -> list[Outcome]:
        """Return what became of all questions when they have been answered."""
        for thread in self._threads:
            thread.join()
        return self.outcomes

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._lock:
                if self._next == self._end:
                    return
                number, self._next = self._next, self._next + 1
            outcome = self._do(number)
            with self._lock:
                self.outcomes.append(outcome)
            if outcome.status in (0, 429, 503):
                self._stopped.wait(1.0)


def summary(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, Any]:
    """Return counts by kind, and times of what was answered."""
    answered = [one for one in outcomes if one.kind == "answered"]
    kinds = sorted({one.kind for one in outcomes} - {"answered"})
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "errors": {kind: sum(one.kind == kind for one in outcomes) for kind in kinds},
        "tokens_per_s": round(sum(one.tokens for one in answered) / wall_s, 2),
    }
    times = {"ttft": [one.first_s for one in answered if one.first_s is not None],
             "latency": [one.seconds for one in answered]}  # fmt: skip
    for name, seconds in times.items():
        ordered = sorted(seconds)
        for share in (50, 95, 99) if ordered else ():
            found[f"{name}_p{share}_s"] = round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 4)
    return found
