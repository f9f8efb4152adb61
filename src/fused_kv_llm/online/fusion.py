"""Fusion: from a planned request to a cache that is ready to generate, and the first logits.

load -> probe -> select -> recompute the selected and the fresh tokens by true position, in one pass or in slices.
"""

from __future__ import annotations

import time
from contextlib import closing

import torch
from torch import Tensor

from fused_kv_llm.decoding import end_token_ids
from fused_kv_llm.model import FusedCache, PausedError, RaggedPart, forward_rows, pause_at
from fused_kv_llm.report import FusionReport, SelectionTrace
from fused_kv_llm.selectors import FirstLayersView, Probe, View, budget_tokens, transfer_strength

from .accounting import count_tokens, count_uses, trace_of
from .adaptive import Rounds
from .context import FusionContext, Recipe
from .divergence import expected_divergence
from .draft import DRAFT_TOKENS, Draft
from .first_layers import FirstLayersPass
from .fused_prompt import FusedPrompt
from .kept_prompt import KeptPrompt, fused_recipe, fused_runs
from .passes import Passes
from .request import Request
from .request_kv import RequestKV
from .selection import Selection, describe_chunks, timed, view_of
from .sharing import Sharing
from .slices import first_slice
from .transfer import TransferPass

__all__ = ["Fusion", "fuse"]


class Fusion:
    """A request on its way to complete KV: load, probe, select, then recompute slice by slice.

    Parameters
    ----------
    context : FusionContext
    request : Request
        Its chunks are open until this is closed.
    recipe : Recipe
    capacity : int
        Prompt tokens plus room for the answer.
    report : FusionReport
        Gets token counts, bytes and the seconds of load, probe and select.
    """

    def __init__(
        self, context: FusionContext, request: Request, recipe: Recipe, capacity: int, report: FusionReport
    ) -> None:
        self._context, self._request, self._recipe, self._report = context, request, recipe, report
        self._selected = request.chunk_positions
        self._budget = budget_tokens(recipe.ratio, self._selected.shape[0])
        self._rows = request.fresh_positions[:0]
        self._slice: RaggedPart | None = None
        self._selection: Selection | None = None
        self._trace: SelectionTrace | None = None
        self._released = self._narrows = False
        self._uncovered: float | None = None
        self._deviations: list[tuple[float, int]] = []
        self._rounds: Rounds | None = None
        self._room = capacity - request.num_tokens
        shifted = context.shift_name is not None
        strength = transfer_strength(recipe.selector, shifted=shifted) if self._reuses else 0.0
        with timed(report, "load"), torch.inference_mode():
            self._kv = RequestKV(context, request, capacity)
        self._passes = Passes(request, self._kv, context.loaded.geometry, strength)

    @property
    def _reuses(self) -> bool:
        return self._budget < self._request.chunk_positions.shape[0]

    @property
    def read_s(self) -> float:
        """Seconds that it has waited for stored KV, or read it itself."""
        return self._kv.read_s

    def begin(self) -> None:
        """Begin to load."""
        context, request, recipe, report, kv = self._context, self._request, self._recipe, self._report, self._kv
        view: View | FirstLayersView = View()
        if self._budget and self._reuses:
            view = view_of(recipe.selector, context.loaded, context.shift_name, report)
        if self._reuses:
            by_anchors = isinstance(view, View) and view.anchors is not None
            with timed(report, "load"):
                kv.feed(view.read_first, shifts_at_once=not by_anchors)
        if isinstance(view, FirstLayersView):
            # It selects in the fused pass itself.
            self._narrows = True
            known = describe_chunks(request, recipe)
            narrowing = FirstLayersPass(request, kv, view, recipe.selector, known, self._budget)
            self._rows, self._slice = narrowing.rows.cpu(), self._passes.part(narrowing)
        else:
            self._selection = Selection(context, request, kv, recipe, view, report)

    def select(self, pause_at_s: float = float("inf")) -> None:
        """Choose what is recomputed, unless that was done.

        Parameters
        ----------
        pause_at_s : float
            As :meth:`advance` takes it.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turns out to be damaged while it is read.
        PausedError
            If its time was over.
        """
        if self._selection is not None:
            self._selected = self._selection.positions(pause_at_s)
            self._trace, self._uncovered = self._selection.trace, self._selection.uncovered
            self._rounds = self._rounds_of(self._selection.known)
            if self._rounds is not None:
                self._selected = self._rounds.selected
            self._selection = None
            if self._request.seen_tokens < self._request.prefix_tokens:
                # A probe may write where it does not look.
                self._kv.write_prefix()
            self._report.selection_bytes += self._kv.bytes_read
            self._rows = self._request.rows(self._selected)

    def advance(self, pause_at_s: float = float("inf"), max_rows: int | None = None) -> FusedPrompt | None:
        """Select and recompute for some time, this request alone.

        Parameters
        ----------
        pause_at_s : float
            ``time.perf_counter()`` at which a pass is left between two layers; see
            :func:`fused_kv_llm.model.pause_at`. Something is always computed.
        max_rows : int or None
            As :meth:`next_slice` takes it.

        Returns
        -------
        FusedPrompt or None
            None if something is left to do.

        Raises
        ------
        ChunkDamagedError
            If a chunk's file turns out to be damaged while it is read.
        """
        loaded = self._context.loaded
        try:
            if self._selection is not None:
                self.select(pause_at_s)
                if time.perf_counter() > pause_at_s:
                    return None
            part = self._next(max_rows, DRAFT_TOKENS)
            with timed(self._report, "fuse"):
                pause_at(loaded, part.forward_pass, pause_at_s)
                rows = part.forward_pass.rows
                logits = forward_rows(loaded, part.ids[None], rows, part.cache, part.forward_pass)
        except PausedError:
            return None
        prompt = self.computed(logits if self._drafts else logits[-1])
        # Drafted tokens are few rows: a step of their own would cost more than they do.
        return self.advance(pause_at_s) if self._drafts and time.perf_counter() < pause_at_s else prompt

    def next_slice(self, max_rows: int | None = None) -> RaggedPart:
        """Return what is to be computed next; the same again until :meth:`computed` is called.

        Parameters
        ----------
        max_rows : int or None
            About how many rows, see :func:`.slices.first_slice`; None for all that are left.
        """
        return self._next(max_rows, 1)

    def _next(self, max_rows: int | None, most_drafted: int) -> RaggedPart:
        if self._slice is not None and self._drafts and self._slice.ids.shape[0] > most_drafted:
            # A draft that was left alone and goes on beside others, row by row.
            self._slice = None
        if self._slice is None:
            # Pending only if the model's layers were hooked while the probe was left.
            self.select()
            if self._rounds is not None and self._drafts:
                positions, ids = (part[:most_drafted] for part in self._rounds.drafted_rows)
                self._slice = self._passes.of_draft(positions, ids)
                return self._slice
            kind = self._request.kind[self._rows]
            rows = self._rows[: first_slice(kind, max_rows or self._rows.shape[0])]
            self._slice = self._passes.of_rows(rows)
        return self._slice

    def computed(self, logits: Tensor) -> FusedPrompt | None:
        """Note that the slice was computed.

        Parameters
        ----------
        logits : Tensor
            float32 ``[vocabulary]``, after the slice's last row; of drafted rows ``[rows, vocabulary]`` too. The report
            has the seconds of its pass.

        Returns
        -------
        FusedPrompt or None
            Once no slice is left. Its cache is the caller's then.
        """
        if self._rounds is not None and self._drafts:
            self._slice = None
            return self._judged(self._rounds, logits)
        done, self._slice = self.next_slice(), None
        if isinstance(done.forward_pass, FirstLayersPass):
            self._selected = done.forward_pass.selected
            first_layers = done.forward_pass
            if first_layers.looks:
                self._report.rename("fuse", "probe", first_layers.begun_at_s, first_layers.selected_at_s)
            self._report.selection_bytes += first_layers.selection_bytes
            self._rows = self._rows[:0]
        else:
            self._rows = self._rows[done.ids.shape[0] :]
        if isinstance(done.forward_pass, TransferPass) and (deviation := done.forward_pass.meter.deviation) is not None:
            self._deviations.append((deviation, done.forward_pass.num_teaching))
        if self._rows.shape[0]:
            return None
        if self._rounds is not None and self._rounds.goes_on():
            return self._judged(self._rounds, logits)
        return self._finished(logits)

    @property
    def _drafts(self) -> bool:
        """Whether drafted tokens are what is computed next."""
        return self._rounds is not None and bool(self._rounds.drafted_rows[0])

    def _rounds_of(self, known: Probe | None) -> Rounds | None:
        adaptive = self._recipe.adaptive
        if adaptive is None or known is None:
            return None
        positions = min(DRAFT_TOKENS, 1 + self._room)
        draft = Draft(self._request.num_tokens, positions, end_token_ids(self._context.loaded))
        return Rounds(adaptive, self._recipe.selector, known, draft)

    def _judged(self, rounds: Rounds, logits: Tensor) -> FusedPrompt | None:
        """Hand logits to the rounds; after the last one, return the prompt."""
        goes_on = rounds.take(logits)
        if goes_on is None:
            return None
        if not goes_on:
            return self._finished(rounds.logits)
        # Tokens of earlier rounds are computed again: they attend to those of this one now.
        self._selected, self._rows = rounds.selected, self._request.rows(rounds.selected)
        return None

    def _finished(self, logits: Tensor) -> FusedPrompt:
        self._count()
        self._kv.cache.length, self._released = self._request.num_tokens, True
        return FusedPrompt(self._kv.cache, logits, self._selected, self._request.text, self._kept())

    @property
    def complete(self) -> tuple[FusedCache, KeptPrompt]:
        """The cache, and what of the prompt's KV is computed already and will not change."""
        request = self._request
        first = request.chunks[0].segment.start if self._reuses else request.num_tokens
        count = min(first, int(self._rows[0])) if self._rows.shape[0] else request.prefix_tokens
        return self._kv.cache, self._kept().up_to(count)

    def _kept(self) -> KeptPrompt:
        context, request = self._context, self._request
        recipe = fused_recipe(self._recipe, context.loaded, context.shift_name) if self._reuses else None
        chunks = request.chunks if self._reuses else ()
        return KeptPrompt(
            request.ids, fused_runs(request.known_runs, chunks, request.num_tokens, recipe), request.since
        )

    @property
    def why_private(self) -> str:
        """Why a complete prompt cannot share its chunks' pages; empty if it can, or none of their KV is used."""
        if self._reuses and self._narrows:
            return f"{self._recipe.selector.name!r} recomputes more tokens in the first layers than in the others"
        return self._context.why_no_pages if self._reuses else ""

    def sharing(self) -> Sharing | None:
        """Return what sharing its chunks' pages would bring a complete prompt; None if it cannot, or has none."""
        if not self._reuses or self._narrows or self._context.pages is None:
            return None
        return Sharing(self._context, self._request, self._kv, self._selected)

    def close(self) -> None:
        """End the feeds and close the chunks; give the memory back unless the prompt is complete."""
        self._kv.close(keep=self._released)
        self._request.close()

    def _count(self) -> None:
        report, rounds, context, request = self._report, self._rounds, self._context, self._request
        count_tokens(request, self._selected, report)
        if self._recipe.adaptive is not None:
            report.expected_divergence = None if rounds is None else rounds.expected
            report.recompute_ratio = rounds.ratio if rounds else float(report.recomputed_tokens > 0)
        elif self._uncovered is not None and self._deviations:
            report.expected_divergence = expected_divergence(self._uncovered, self._deviations)
        if self._reuses:
            count_uses(context, request, self._recipe.selector, self._selected, report)
        shifts = self._kv.shifts
        if shifts is not None and shifts.bytes_loaded:
            report.sidecar_bytes_loaded["context_shift"] = shifts.bytes_loaded
        report.trace = trace_of(request, self._selected, context.loaded.geometry.num_layers, self._trace)


def fuse(context: FusionContext, request: Request, recipe: Recipe, capacity: int, report: FusionReport) -> FusedPrompt:
    """Build a request's KV alone and in one pass, recomputing only what the recipe's selector picks.

    Parameters
    ----------
    context, request, recipe, capacity, report
        As :class:`Fusion` takes them; the report gets the seconds of the pass as well.

    Returns
    -------
    FusedPrompt

    Raises
    ------
    ChunkDamagedError
        If a chunk's file turns out to be damaged while it is read. Nothing has been returned then, and the request can
        be planned again without it.
    """
    with torch.inference_mode(), closing(Fusion(context, request, recipe, capacity, report)) as fusion:
        fusion.begin()
        prompt = None
        while prompt is None:
            prompt = fusion.advance()
    return prompt
