"""The shift map: what prompts change in a chunk beyond what its neighbours alone change, predicted from its own KV.

A context shift (:mod:`fused_kv_llm.context_shift`) is a sample: the chunks of a prompt are others, and more of them,
than the neighbours it was made with. Part of what is missing is the same for all chunks of a model. For every layer and
KV head a linear map predicts it from a token's plain KV and its shift. It is fitted once, on a few prompts of the
corpus's own chunks, of which full prefill says what their KV should have been; a question is not needed. Nothing is
added at query time: the sidecar holds the corrected shift.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import Geometry
from fused_kv_llm.paths import write_atomically

__all__ = ["ShiftLesson", "ShiftLessons", "ShiftMap", "fit_shift_map", "parse_shift_map", "read_shift_map"]

FIRST_TOKENS = 4
"""Tokens at the beginning of a chunk, attention sinks in plain KV, that have an offset of their own in the map."""

PRIOR_TOKENS = 1500.0
"""Weight of the assumption that the shift is right as it is, in tokens learned from: fewer lean on it more."""

TOKENS_APART = 2
"""One of so many tokens is learned from, the first ones apart: those beside it teach nearly the same."""

_TINY = 1e-6
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShiftMap:
    """A linear map for every layer and KV head.

    Parameters
    ----------
    weights : Tensor
        float32 ``[L, Hkv, F, Dk + Dv]`` from ``F = 2 * (Dk + Dv) + FIRST_TOKENS + 1`` features of a token: its plain
        key and value, those of its shift, which of the first tokens it is, and a constant.
    """

    weights: Tensor

    def correct(self, plain: ChunkKV, shift: tuple[Tensor, Tensor], geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return a chunk's corrected shift, float32 keys and values ``[L, Hkv, T, D]`` as rotated as the plain ones.

        Parameters
        ----------
        plain : ChunkKV
        shift : tuple of Tensor
            What contexts change in its keys and values on average, in the same rotation.
        geometry : Geometry
        """
        more = _features(plain, shift, geometry) @ self.weights.to(plain.keys.device)
        key_dim = plain.keys.shape[-1]
        return (
            shift[0].float() + _turned(more[..., :key_dim], plain.position, geometry),
            shift[1].float() + more[..., key_dim:],
        )

    def write(self, path: Path) -> None:
        """Write the map; raises OSError."""
        write_atomically(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of the map's file."""
        return save({"weights": self.weights.cpu().contiguous()})

    @classmethod
    def from_bytes(cls, data: bytes) -> ShiftMap:
        """Return the map in a file's content; raises SafetensorError or KeyError if there is none."""
        return cls(load(data)["weights"].float())


def read_shift_map(path: Path, plain: ChunkKV) -> ShiftMap | None:
    """Read a map; None if there is none, or none for KV of this shape."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("The shift map %s cannot be read (%s): it is fitted again.", path, error)
        return None
    return parse_shift_map(data, plain, str(path))


def parse_shift_map(data: bytes, plain: ChunkKV, source: str) -> ShiftMap | None:
    """Return the map in a file's content; None if there is none, or none for KV of this shape.

    Parameters
    ----------
    data : bytes
    plain : ChunkKV
        Plain KV of any chunk.
    source : str
        Where the content is from, for the log.
    """
    try:
        weights = load(data)["weights"]
    except (SafetensorError, KeyError) as error:
        _log.warning("The shift map %s cannot be read (%s): it is fitted again.", source, error)
        return None
    layers, heads, _, key_dim = plain.keys.shape
    width = key_dim + plain.values.shape[-1]
    fits = weights.shape == (layers, heads, 2 * width + FIRST_TOKENS + 1, width)
    return ShiftMap(weights.float()) if fits and bool(weights.isfinite().all()) else None


@dataclass(frozen=True, slots=True)
class ShiftLesson:
    """A chunk of a prompt, of which full prefill says what its shift should have been.

    Parameters
    ----------
    plain : ChunkKV
    shift : tuple of Tensor
        As :meth:`ShiftMap.correct` takes it.
    true : ChunkKV
        Its KV in the prompt by full prefill, moved to where the plain one is.
    weight : float
        How much of a shift counts at its place, see :func:`.place_weight`.
    """

    plain: ChunkKV
    shift: tuple[Tensor, Tensor]
    true: ChunkKV
    weight: float

    def features(self, geometry: Geometry) -> Tensor:
        """Return what is known of its tokens, float32 ``[L, Hkv, T, F]``."""
        return self.weight * _features(self.plain, self.shift, geometry)

    def missing(self, geometry: Geometry) -> Tensor:
        """Return what the shift lacks, float32 ``[L, Hkv, T, Dk + Dv]``, keys as if at position 0."""
        keys, values = (
            true.float() - plain.float() - self.weight * shift.float()
            for true, plain, shift in zip(
                (self.true.keys, self.true.values), (self.plain.keys, self.plain.values), self.shift, strict=True
            )
        )
        return torch.cat((_turned(keys, -self.plain.position, geometry), values), -1)


class ShiftLessons:
    """What a map can learn from prompts: the sums of a weighted least-squares fit.

    Attributes
    ----------
    num_tokens : int
        Those it has learned from.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sums: list[Tensor] = []

    def add(self, lesson: ShiftLesson, geometry: Geometry) -> None:
        """Learn from a chunk of a prompt: from its first tokens, which have offsets of their own, and from some others.

        Parameters
        ----------
        lesson : ShiftLesson
        geometry : Geometry
        """
        tokens = torch.arange(len(lesson.plain.token_ids), device=lesson.plain.keys.device)
        tokens = tokens[(tokens < FIRST_TOKENS) | (tokens % TOKENS_APART == 0)]
        features, missing = (of(geometry)[:, :, tokens] for of in (lesson.features, lesson.missing))
        across = features.transpose(-1, -2)
        sums = [part.double().cpu() for part in (across @ features, across @ missing, missing.square().sum((-1, -2)))]
        self._sums = sums if not self._sums else [old + new for old, new in zip(self._sums, sums, strict=True)]
        self.num_tokens += features.shape[2]

    def __add__(self, other: ShiftLessons) -> ShiftLessons:
        if not self._sums:
            return other
        both = ShiftLessons()
        both.num_tokens = self.num_tokens + other.num_tokens
        both._sums = [one + two for one, two in zip(self._sums, other._sums, strict=True)]
        return both

    def solve(self) -> Tensor:
        """Return the map's weights, float64, by ridge regression."""
        gram, across, _ = self._sums
        indicators = FIRST_TOKENS + 1
        power = gram.diagonal(dim1=-2, dim2=-1)[..., :-indicators].mean(-1, keepdim=True)
        ridge = (power * PRIOR_TOKENS / self.num_tokens).expand(*power.shape[:-1], gram.shape[-1]).clone()
        ridge[..., -indicators:] = power * _TINY
        weights: Tensor = torch.linalg.solve(gram + torch.diag_embed(ridge + _TINY), across)
        return weights

    def error(self, weights: Tensor) -> Tensor:
        """Return what a map leaves unexplained, float64 ``[L]``, as a share of what no map leaves."""
        gram, across, rest = self._sums
        left = rest - 2 * (weights * across).sum((-1, -2)) + (weights * (gram @ weights)).sum((-1, -2))
        return left.sum(1) / rest.sum(1).clamp_min(_TINY)


def fit_shift_map(known: ShiftLessons, last: ShiftLessons) -> ShiftMap:
    """Fit a map to prompts; a layer in which it would not help with the last prompt stays as it is.

    Parameters
    ----------
    known : ShiftLessons
        Of all prompts but one.
    last : ShiftLessons
        Of that one.
    """
    helps = last.error(known.solve()) < 1.0
    weights = (known + last).solve() * helps[:, None, None, None]
    return ShiftMap(weights.float())


def _features(plain: ChunkKV, shift: tuple[Tensor, Tensor], geometry: Geometry) -> Tensor:
    """Return float32 ``[L, Hkv, T, F]``; keys stand as if at position 0, so that equal tokens look equal everywhere."""
    keys, moved = (_turned(part, -plain.position, geometry) for part in (plain.keys, shift[0]))
    known = torch.cat((keys, plain.values.float(), moved, shift[1].float()), -1)
    tokens = known.shape[2]
    which = torch.zeros(tokens, FIRST_TOKENS + 1, device=known.device)
    which[:, -1] = 1.0
    which[: min(tokens, FIRST_TOKENS)] += torch.eye(FIRST_TOKENS + 1, device=known.device)[: min(tokens, FIRST_TOKENS)]
    return torch.cat((known, which.expand(*known.shape[:2], -1, -1)), -1)


def _turned(keys: Tensor, start: int, geometry: Geometry) -> Tensor:
    """Rotate keys ``[L, Hkv, T, D]`` by the positions from `start` on, or back by those from ``-start`` on."""
    steps = torch.arange(keys.shape[2])
    moves = steps + start if start >= 0 else start - steps
    tables = geometry.tables(moves, keys.device)
    return torch.stack([rerotate_keys(layer.float(), table) for layer, table in zip(keys, tables, strict=True)])
