"""Where requests go that have ended: into the request log, the counters, and the numbers for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import Request

from .activity import Activity, Ended, tokens_of
from .guard import body_bytes_of, tenant_of
from .history import History
from .metrics import Metrics
from .recording import Recording
from .refusals import RefusedError
from .requests import ChatRequest, CompletionRequest
from .savings import Saving, Savings
from .tenants import Tenants

__all__ = ["ANSWERING", "Recorder"]

ANSWERING = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose requests are kept."""


class Recorder:
    """Notes requests.

    Parameters
    ----------
    tenants : Tenants
    metrics : Metrics
    history : History or None
        None keeps none.
    texts : bool
        Whether what was asked and answered is kept.

    Attributes
    ----------
    activity : Activity
    savings : Savings
    """

    def __init__(self, tenants: Tenants, metrics: Metrics, history: History | None, *, texts: bool) -> None:
        self._tenants, self._metrics, self._history, self._texts = tenants, metrics, history, texts
        self.activity, self.savings = Activity(), Savings(tenants.default)
        # By tenant and name, those that are open.
        self._open: dict[tuple[str, str], Recording] = {}

    def under_way(self, tenant: str, name: str) -> Recording | None:
        """Return a tenant's open request by the name in its ``X-Request-Id``, the newest of that name; None without."""
        return self._open.get((self._tenants.name(tenant), name))

    @contextmanager
    def request(self, http: Request, request: ChatRequest | CompletionRequest | None) -> Iterator[Recording]:
        """Note a request from here to the end of the block; what ends the block is passed on."""
        name: str = http.scope.get("fused_kv_request", "")
        tenant = self._tenants.name(tenant_of(http))
        recording = Recording(request, http.url.path, name, tenant, body_bytes_of(http))
        self._open[tenant, name] = recording
        self.activity.began(recording.tenant)
        error: BaseException | None = None
        try:
            yield recording
        except BaseException as raised:
            error = raised
            raise
        finally:
            recording.end(error)
            if self._open.get((recording.tenant, name)) is recording:
                del self._open[recording.tenant, name]
            self._ended(recording, None if request is None else request.fused_kv.tenant)

    def invalid(self, http: Request, refusal: RefusedError) -> None:
        """Note a request whose body made no sense."""
        if http.url.path in ANSWERING and http.method == "POST":
            try:
                with self.request(http, None):
                    raise refusal
            except RefusedError:
                return

    def _ended(self, recording: Recording, part: str | None) -> None:
        saving = self._saving(recording)
        tokens = [tokens_of(report) for report in recording.prompts]
        sums = {name: sum(one[name] for one in tokens) for name in (tokens[0] if tokens else ())}
        if sums:
            sums["completion"] = recording.completion_tokens
        ttft_s = recording.prompts[0].ttft_s if recording.prompts else None
        ended = Ended(self.activity.now_s(), recording.status, ttft_s, sums, recording.verdicts, saving)
        self.activity.ended(recording.tenant, ended, part)
        if saving is not None:
            self._metrics.saved(saving)
        if self._history is not None:
            saved_s, texts = None if saving is None else saving.saved_s, self._texts
            self._history.add(lambda: recording.record(texts=texts, saved_s=saved_s), recording.nbytes)

    def _saving(self, recording: Recording) -> Saving | None:
        found = [saving for report in recording.prompts if (saving := self.savings.of(report)) is not None]
        return Saving(*(sum(values) for values in zip(*found, strict=True))) if found else None
