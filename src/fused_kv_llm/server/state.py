"""What the routes of a server share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from fastapi import Request

from .config import ServerConfig
from .desk import DocumentDesk
from .history import History
from .metrics import Metrics
from .padding import Padding
from .quotas import Quotas
from .recorder import Recorder
from .refusals import RefusedError
from .slots import Slots
from .tenants import Tenants

__all__ = ["ServerState", "state_of"]


@dataclass(slots=True)
class ServerState:
    """What the routes of a server share.

    Parameters
    ----------
    config : ServerConfig
    tenants : Tenants
    documents : DocumentDesk
    metrics : Metrics
    model_name : str
        What clients call the model.
    created_s : int
        When the server began, in seconds since 1970.
    history : History or None
        The request log; None if none is kept.
    draining : bool
        Whether it is about to end, and takes no more requests.
    """

    config: ServerConfig
    tenants: Tenants
    documents: DocumentDesk
    model_name: str
    created_s: int
    metrics: Metrics = field(default_factory=Metrics)
    history: History | None = None
    draining: bool = False
    quotas: Quotas = field(init=False)
    recorder: Recorder = field(init=False)
    padding: Padding = field(init=False)
    comparisons: Slots = field(init=False)
    estimates: Slots = field(init=False)

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.config.quotas, self.metrics.over_quota)
        several = 2 if len(self.config.api_keys) > 1 else 1
        self.comparisons = Slots(4, 4 // several, "comparisons and measurements")
        self.estimates = Slots(2, 2 // several, "estimates of documents")
        self.padding = Padding(self.tenants.default, self.config.ttft_padding)
        texts = self.config.keeps_of_requests == "texts" and not self.tenants.default.store.is_encrypted
        self.recorder = Recorder(self.tenants, self.metrics, self.history, texts=texts)

    def check_model(self, name: str | None) -> None:
        """Make sure that a client asks for the model that is here.

        Raises
        ------
        RefusedError
            If it is another one.
        """
        if name is not None and name != self.model_name:
            message = f"The model {name!r:.80} is not served here; {self.model_name!r} is"
            raise RefusedError(message, 404, code="model_not_found", param="model")

    def check_open(self) -> None:
        """Make sure that requests are taken.

        Raises
        ------
        RefusedError
            If the server is about to end.
        """
        if self.draining:
            raise _stopping()

    def drain(self) -> None:
        """Take no more requests, and refuse those that wait; may be called from a signal's handler."""
        self.draining = True
        self.tenants.default.requests.give_up_waiting(_stopping())


def _stopping() -> RefusedError:
    message = "The server is about to stop; ask again later"
    return RefusedError(message, 503, kind="server_error", code="shutting_down")


def state_of(request: Request) -> ServerState:
    """Return what the routes of this request's server share."""
    return cast(ServerState, request.app.state.fused_kv)
