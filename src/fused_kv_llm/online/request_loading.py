"""What a request loads before it begins, and when it may begin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import FirstLayersView, View, budget_tokens
from fused_kv_llm.store import Sidecars, StoredSidecar

from .context import FusionContext, Recipe
from .load_ahead import LoadAhead
from .loading_depth import loading_depth, may_begin
from .read_ahead import layer_groups
from .request import Request
from .selection import view_of

__all__ = ["RequestLoading"]

# Reading that takes no longer is left to the thread that computes.
_NEGLIGIBLE_S = 0.01


class RequestLoading:
    """Decides what is loaded for a request and how much of it must be there; one thread at a time.

    Chunks in the memory tier need no loading. Chunks on a fast disk, which are mostly in the system's cache, are read
    layer by layer by the thread that computes, if it has nothing else to do: copying and hashing them beside it would
    take its cores. Everything else is loaded ahead by threads that wait for the disk.

    Parameters
    ----------
    context : FusionContext
    request : Request
    recipe : Recipe
    """

    def __init__(self, context: FusionContext, request: Request, recipe: Recipe) -> None:
        self._context, self._request = context, request
        num_chunk_tokens = int(request.chunk_positions.shape[0])
        budget = budget_tokens(recipe.ratio, num_chunk_tokens)
        self._keys: dict[Callable[[int, int], None], str] = {}
        self._reuses = budget < num_chunk_tokens
        self._teaches = recipe.adaptive is None
        self._rows = int(request.fresh_positions.shape[0]) + budget
        self._view: View | FirstLayersView = View()
        if budget and self._reuses:
            self._view = view_of(recipe.selector, context.loaded, context.shift_name, FusionReport())

    def begin(self, *, ahead: bool, on_change: Callable[[], None]) -> LoadAhead | None:
        """Find out whether the request's chunks have to be loaded; any thread may do it.

        Parameters
        ----------
        ahead : bool
            Whether others are computed meanwhile, so that nothing of this request may be waited for.
        on_change : callable
            See :class:`.load_ahead.LoadAhead`.

        Returns
        -------
        LoadAhead or None
            What has to be loaded by other threads; the request has it as well.
        """
        geometry, chunks = self._context.loaded.geometry, self._request.chunks
        on_disk = list({chunk.stored.key: chunk.stored for chunk in chunks if chunk.stored.tier != "memory"}.values())
        # Context shifts are a part of what is in the computing thread's way, but alone it has nothing else to do.
        if not self._reuses or not (on_disk or ahead):
            return None
        order = [layer for group in layer_groups(geometry.num_layers, self._view.read_first) for layer in group]
        self._keys = {stored.load_layers: stored.key for stored in on_disk}
        self._keys.update(self._sidecar_places())
        places = list(self._keys)
        if not places:
            return None
        load = LoadAhead(order, places, on_change)
        self._request.loading = load
        if not ahead:
            # The first layer tells how fast the disk is.
            for _ in on_disk:
                job = load.take()
                if job is not None:
                    load.read(job)
            if load.error is None and (load.is_busy or load.seconds_per_layer * len(order) < _NEGLIGIBLE_S):
                self._request.loading = None
        return self._request.loading

    @property
    def depth(self) -> int:
        """How many layers, in the order in which they are needed, must be there before the request begins alone."""
        load, num_layers = self._request.loading, self._context.loaded.geometry.num_layers
        row_s = self._context.row_s.value
        compute_s = float("inf") if row_s is None else row_s * self._rows / num_layers
        least = max(1, len(self._view.read_first))
        return least if load is None else max(least, loading_depth(num_layers, load.seconds_per_layer, compute_s))

    def may_begin(self, *, alone: bool) -> bool:
        """Whether the request can be computed: without waiting for its layers, unless nobody else is kept waiting.

        Parameters
        ----------
        alone : bool
            Whether no other request is being answered.
        """
        return may_begin(self._request.loading, lambda: self.depth, alone=alone)

    @property
    def is_stuck(self) -> bool:
        """Whether a read of it has not come back for a while."""
        return self._request.loading is not None and self._request.loading.is_stuck

    @property
    def stalled_s(self) -> float:
        """For how many seconds nothing of it has come back; 0 if nothing is being read."""
        return 0.0 if self._request.loading is None else self._request.loading.stalled_s

    @property
    def is_idle(self) -> bool:
        """Whether something of it is left to read and nobody is at it."""
        return self._request.loading is not None and self._request.loading.is_idle

    @property
    def hanging_keys(self) -> set[str]:
        """The chunks of which something is being read."""
        load = self._request.loading
        return set() if load is None else {self._keys[place] for place in load.hanging}

    def check(self) -> tuple[float, float] | None:
        """Return from when until when, by ``time.perf_counter()``, the request was loaded before it began.

        None if nothing had to be loaded.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turned out to be damaged.
        """
        load = self._request.loading
        if load is None:
            return None
        if load.error is not None:
            raise load.error
        return load.begun_s, load.ended_s or time.perf_counter()

    def learn(self, compute_s: float) -> None:
        """Learn how long computing takes, from a prompt that was computed by itself, in one round.

        Parameters
        ----------
        compute_s : float
            Seconds of its probe and its passes, without those in which it waited for stored KV, or read it.
        """
        if self._teaches:
            self._context.row_s.add(max(0.0, compute_s) / self._rows)

    def _sidecar_places(self) -> dict[Callable[[int, int], None], str]:
        chunks, header, sidecars = self._request.chunks, self._request.header_tokens, self._context.sidecars
        places: dict[Callable[[int, int], None], str] = {}
        if self._context.shift_name is not None:
            shifted = dict.fromkeys(chunk.stored.key for chunk in chunks if chunk.shift_weight(header) > 0)
            num_layers = self._context.loaded.geometry.num_layers
            opened = self._request.shifts
            shift_name = self._context.shift_name
            places |= {_Shift(sidecars, key, shift_name, num_layers, opened).load: key for key in shifted}
        if isinstance(self._view, View) and self._view.anchors is not None:
            used = dict.fromkeys((chunk.stored.key, self._request.anchor_names(chunk, self._view)) for chunk in chunks)
            places |= {_Whole(sidecars, key, names).load: key for key, names in used}
        return places


class _Shift:
    """A context shift that is opened when it is first read; used by several threads."""

    def __init__(
        self, sidecars: Sidecars, key: str, name: str, num_layers: int, opened: dict[str, StoredSidecar | None]
    ) -> None:
        self._sidecars, self._key, self._name, self._num_layers, self._opened = sidecars, key, name, num_layers, opened
        self._lock = threading.Lock()

    def load(self, start: int, stop: int) -> None:
        """Bring layers into memory."""
        with self._lock:
            if self._key not in self._opened:
                self._opened[self._key] = self._sidecars.open(self._key, self._name, whole=True)
            shift = self._opened[self._key]
        # One of another model is reported by who uses it.
        if shift is not None and not shift.in_memory and shift.rows == self._num_layers:
            shift.load(start, stop)


class _Whole:
    """A sidecar that is read as a whole when it is first needed; who needs it finds it in the memory tier.

    It is the first that there is of some names.
    """

    def __init__(self, sidecars: Sidecars, key: str, names: tuple[str, ...]) -> None:
        self._sidecars, self._key, self._names = sidecars, key, names
        self._lock, self._is_read = threading.Lock(), False

    def load(self, start: int, stop: int) -> None:
        """Bring it into memory, whichever layers are asked for."""
        with self._lock:
            if not self._is_read:
                any(self._sidecars.read(self._key, name) for name in self._names)
                self._is_read = True
