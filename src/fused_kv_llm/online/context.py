"""What requests are fused with: the engine's parts, made once, and how one request is to be fused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from fused_kv_llm.kv import PagePool
from fused_kv_llm.model import CachePool, LoadedModel, PrefixKV
from fused_kv_llm.selectors import Selector
from fused_kv_llm.store import Sidecars
from fused_kv_llm.thread_pool import ThreadPool

from .adaptive import Adaptive
from .draft import DRAFT_TOKENS
from .loading_depth import MovingAverage

__all__ = ["FusionContext", "Recipe"]


@dataclass(frozen=True, slots=True)
class FusionContext:
    """What all requests of an engine share.

    Parameters
    ----------
    loaded : LoadedModel
    prefix : PrefixKV
        KV of the ids that every prompt begins with.
    pool : CachePool
        Where the memory of caches comes from.
    sidecars : Sidecars
        The store's: context shifts and anchors.
    readers : ThreadPool or None
        Threads that read from disk; without them, the system is asked to read ahead.
    shift_name : str or None
        Name of the sidecars with the context shifts that are used; None uses none.
    pages : PagePool or None
        The pages of chunks that requests share; None where they do not.
    why_no_pages : str
        Why the model's requests cannot share any; empty if they can, or are not to.
    row_s : MovingAverage
        Seconds that probing and fusing took for a row of a prompt, without waiting for its KV.
    weigh_use : callable or None
        Takes a chunk's key, the cache fix overhead of its use, and its tokens, for the store's policy.
    """

    loaded: LoadedModel
    prefix: PrefixKV
    pool: CachePool
    sidecars: Sidecars
    readers: ThreadPool | None = None
    shift_name: str | None = None
    pages: PagePool | None = None
    why_no_pages: str = ""
    row_s: MovingAverage = field(default_factory=MovingAverage)
    weigh_use: Callable[[str, float, int], None] | None = None

    @property
    def executor(self) -> Executor | None:
        """This process's reader threads."""
        return None if self.readers is None else self.readers.executor()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a request is fused.

    Parameters
    ----------
    selector : Selector
        Which chunk tokens are recomputed.
    ratio : float
        Recomputed chunk tokens over reusable chunk tokens, in [0, 1]; if it is adaptive, of the first
        round that recomputes any.
    seed : int
        For selectors that draw.
    prefix_cache : bool
        Whether KV that earlier requests have left is used, and some is left to later ones.
    trace_scores : bool
        Whether the report's trace has what the selector went by.
    adaptive : Adaptive or None
        Whether there are further rounds.
    """

    selector: Selector
    ratio: float
    seed: int = 0
    prefix_cache: bool = True
    trace_scores: bool = False
    adaptive: Adaptive | None = None

    def room_tokens(self, max_tokens: int) -> int:
        """Return for how many tokens behind the prompt there has to be room: those of an answer, or of a draft."""
        return max_tokens if self.adaptive is None else max(max_tokens, DRAFT_TOKENS - 1)
