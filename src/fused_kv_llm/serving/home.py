"""What a request asks of the engine that it is of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.model import FusedCache
from fused_kv_llm.online import FusionContext, KeptPrompt, ReadPrompt, Recipe, Request
from fused_kv_llm.prompt import Prompt
from fused_kv_llm.report import FusionReport
from fused_kv_llm.verdicts import JudgedPrompt

from .hung_reads import HungReads
from .limits import Limits

__all__ = ["RequestHome"]


class RequestHome(Protocol):
    """The engine that a request is of: its store, and what it learns from requests."""

    context: FusionContext
    limits: Limits
    context_length: int
    tenant: str
    closed: bool
    hung: HungReads

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Render and tokenise a prompt."""

    def cached_tokens(self, prompt: ReadPrompt, recipe: Recipe) -> float:
        """Return how many of a prompt's tokens would not have to be computed now."""

    def plan_served(
        self,
        prompt: ReadPrompt,
        recipe: Recipe,
        report: FusionReport,
        *,
        counted: bool = True,
        skip: Callable[[str], bool] = lambda key: False,
    ) -> Request:
        """Find what earlier requests have left of a prompt, and open the chunks of the rest.

        Chunks that `skip` says, by their keys, are computed.

        What is not `counted` is used when :meth:`uses_of` says so.
        """

    def uses_of(self, request: Request, report: FusionReport) -> Callable[[], None]:
        """Return a function that counts the uses of a request's chunks, for when the request is confirmed."""

    def keep_variants(self, request: Request) -> None:
        """Have the chunks of a prompt kept as they are in it, later and in the background."""

    def keep(self, kept: KeptPrompt, cache: FusedCache) -> None:
        """Keep what later requests may use of a request's KV; what cannot be kept is not."""

    def discard(self, error: ChunkDamagedError, report: FusionReport) -> None:
        """Put a damaged chunk away, so that the next plan does without it."""

    def judge_expected(self, expected: Sequence[str], prompt: JudgedPrompt, report: FusionReport) -> None:
        """Put verdicts on chunks that were expected in a prompt into its report."""

    def check_unchanged(self) -> None:
        """Make sure that the model is still the one whose KV is stored."""

    def forget_device(self) -> None:
        """Forget what was on the device only."""

    def answered(self, prompt_text: str) -> None:
        """Note that the request for a prompt has ended, with its whole answer or without."""
