"""Requests that share a model: one thread owns it and computes for all of them, step by step."""

from __future__ import annotations

from .handle import PieceStream, RequestHandle
from .home import RequestHome
from .hung_reads import HungReads
from .limits import Limits, limits_of
from .loops import loop_of
from .recovery import RecoveryCounts
from .served_request import RequestState, ServedRequest
from .step_loop import StepLoop
from .terms import Terms

__all__ = [
    "HungReads",
    "Limits",
    "PieceStream",
    "RecoveryCounts",
    "RequestHandle",
    "RequestHome",
    "RequestState",
    "ServedRequest",
    "StepLoop",
    "Terms",
    "limits_of",
    "loop_of",
]
