"""What a system reuses of a prompt: nothing, the longest prefix, or the KV of every stored chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from fused_kv_llm.kv import HostLevel, PrefixMatch, PrefixRun, PrefixTree, RankedEviction
from fused_kv_llm.selectors import budget_tokens

from .costs import Costs, Work
from .reading import ChunkPlace
from .shape import ModelShape
from .tiers import MISSED, ChunkTiers
from .trace import Asked, Trace

__all__ = ["GRAIN_TOKENS", "FullPrefill", "FusedChunks", "Plan", "PrefixOnly", "Reuse", "work_of"]

GRAIN_TOKENS = 32
# A grain's key and value, two numbers in float16, stand for the KV of its tokens.
_GRAIN_NBYTES = 4
# Grains of a chunk have numbers of their own.
_MOST_GRAINS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done for a prompt.

    Parameters
    ----------
    work : Work
    probed_tokens : float
        Chunk tokens that a probe scores.
    places : list of ChunkPlace
        What has to be read before.
    """

    work: Work
    probed_tokens: float = 0.0
    places: list[ChunkPlace] = field(default_factory=list)


class Reuse(Protocol):
    """One way to reuse KV."""

    def cached_tokens(self, asked: Asked) -> float:
        """Return how many prompt tokens would not be computed now."""

    def plan(self, request: Any, asked: Asked) -> Plan:
        """Say what is done for a prompt."""

    def complete(self, request: Any, asked: Asked) -> None:
        """Learn that a prompt's KV is complete."""

    def end(self, request: Any, asked: Asked) -> None:
        """Learn that a request has ended."""


def work_of(scattered: float, question: float, prompt: float, placed: float = 0.0, behind: float = 0.0) -> Work:
    """Return the work of rows all over a prompt, after its first `behind` tokens, and of a question at its end."""
    pairs = scattered * (behind + prompt) / 2 + question * prompt
    return Work(scattered + question, pairs, placed)


class FullPrefill:
    """Nothing is reused.

    Parameters
    ----------
    trace : Trace
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def cached_tokens(self, asked: Asked) -> float:
        """Return 0."""
        return 0.0

    def plan(self, request: Any, asked: Asked) -> Plan:
        """Have every token computed."""
        total = self._trace.prompt_tokens(asked)
        return Plan(work_of(total - asked.question_tokens, asked.question_tokens, total))

    def complete(self, request: Any, asked: Asked) -> None:
        """Do nothing."""

    def end(self, request: Any, asked: Asked) -> None:
        """Do nothing."""


class PrefixOnly:
    """The longest prefix is reused, by the library's prefix tree, with one node's token for 32 tokens.

    Parameters
    ----------
    trace : Trace
    shape : ModelShape
    device_bytes, host_bytes : float
    policy : str
    costs : Costs
        Tell the tree's policy what computing takes.
    """

    def __init__(
        self, trace: Trace, shape: ModelShape, device_bytes: float, host_bytes: float, policy: str, costs: Costs
    ) -> None:
        self._trace, self.found_tokens, self.asked_tokens = trace, 0.0, 0.0

        def seconds(cached: float, new: float) -> float:
            behind, rows = cached * GRAIN_TOKENS, new * GRAIN_TOKENS
            return costs.prompt_s(work_of(rows, 0.0, behind + rows, behind=behind))

        scale = _GRAIN_NBYTES / (GRAIN_TOKENS * shape.kv_bytes_per_token)
        host = HostLevel(int(host_bytes * scale), torch.clone, torch.clone) if host_bytes else None
        self.tree = PrefixTree(int(device_bytes * scale), RankedEviction(policy, seconds), host)
        self._matches: dict[int, PrefixMatch] = {}

    def cached_tokens(self, asked: Asked) -> float:
        """Return what the tree has."""
        return self.tree.known_tokens(self._ids(asked), None) * float(GRAIN_TOKENS)  # type: ignore[arg-type]

    def plan(self, request: Any, asked: Asked) -> Plan:
        """Compute what stands behind the longest match; what of it is on the host is copied."""
        before = self.tree.swaps.in_nbytes
        match = self._matches[id(request)] = self.tree.match(self._ids(asked), None)  # type: ignore[arg-type]
        total = self._trace.prompt_tokens(asked)
        found = min(match.num_tokens * float(GRAIN_TOKENS), total - asked.question_tokens)
        copied = (self.tree.swaps.in_nbytes - before) / _GRAIN_NBYTES * GRAIN_TOKENS
        self.found_tokens += found
        self.asked_tokens += total - asked.question_tokens
        rows = total - asked.question_tokens - found
        return Plan(work_of(rows, asked.question_tokens, total, placed=copied, behind=found))

    def complete(self, request: Any, asked: Asked) -> None:
        """Do nothing."""

    def end(self, request: Any, asked: Asked) -> None:
        """Leave the prompt's KV."""
        match, ids = self._matches.pop(id(request)), self._ids(asked)
        kv = torch.zeros(1, 1, len(ids), 1, dtype=torch.float16)
        self.tree.insert(ids, [PrefixRun(len(ids))], kv, kv, cached=match.num_tokens)  # type: ignore[arg-type]
        match.release()

    def _ids(self, asked: Asked) -> np.ndarray[Any, Any]:
        tokens = self._trace.chunk_tokens
        runs = [
            _MOST_GRAINS * chunk + np.arange(max(1, min(_MOST_GRAINS - 1, tokens[chunk] // GRAIN_TOKENS)))
            for chunk in asked.chunks
        ]
        return np.concatenate(runs) if runs else np.empty(0, np.int64)


class FusedChunks:
    """Every stored chunk is reused, wherever it stands.

    Parameters
    ----------
    trace : Trace
    shape : ModelShape
    tiers : ChunkTiers
    ratio : float
        Recomputed chunk tokens over chunk tokens.
    on_missed : callable
        Called with the chunks that were missed when a request has ended.
    """

    def __init__(
        self,
        trace: Trace,
        shape: ModelShape,
        tiers: ChunkTiers,
        ratio: float,
        on_missed: Callable[[Sequence[int]], None],
    ) -> None:
        self._trace, self._shape, self._tiers, self._ratio = trace, shape, tiers, ratio
        self._on_missed = on_missed
        self._read: dict[int, list[int]] = {}
        self._missed: dict[int, list[int]] = {}

    def cached_tokens(self, asked: Asked) -> float:
        """Return the tokens of stored chunks that would not be recomputed."""
        found = sum(self._trace.chunk_tokens[one] for one in asked.chunks if self._tiers.has(one))
        return found - budget_tokens(self._ratio_of(asked), found)

    def plan(self, request: Any, asked: Asked) -> Plan:
        """Compute the question, the missed chunks and a share of the others, which are read."""
        tokens, total = self._trace.chunk_tokens, self._trace.prompt_tokens(asked)
        tiers = {chunk: self._tiers.open(chunk) for chunk in asked.chunks}
        self._missed[id(request)] = [chunk for chunk, tier in tiers.items() if tier == MISSED]
        found = sum(tokens[chunk] for chunk, tier in tiers.items() if tier != MISSED)
        budget = budget_tokens(self._ratio_of(asked), found)
        if budget >= found:
            self._read[id(request)] = []
            return Plan(work_of(total - asked.question_tokens, asked.question_tokens, total))
        read = self._read[id(request)] = [chunk for chunk, tier in tiers.items() if tier in ("disk", "remote")]
        places = [ChunkPlace(tiers[chunk], self._tiers.nbytes[chunk] / self._shape.num_layers) for chunk in read]
        scattered = budget + total - asked.question_tokens - found
        work = work_of(scattered, asked.question_tokens, total, placed=found)
        return Plan(work, found if budget else 0.0, places)

    def complete(self, request: Any, asked: Asked) -> None:
        """Hold in memory what was read."""
        for chunk in self._read.pop(id(request)):
            self._tiers.read(chunk)

    def end(self, request: Any, asked: Asked) -> None:
        """Have stored what was missed."""
        self._on_missed(self._missed.pop(id(request)))

    def _ratio_of(self, asked: Asked) -> float:
        return self._ratio if asked.ratio is None else asked.ratio
