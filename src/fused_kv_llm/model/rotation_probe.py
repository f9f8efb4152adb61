"""Finding a model's rotation by looking: the same tokens at two places, and what turns one's keys into the other's.

A name says little about how a model rotates: some layers not at all, some with another base, in pairs of neighbours or
of halves, in one direction or the other, and latent attention rotates what it caches as values. All of these turn the
keys of a token by an angle that is proportional to its position. So the keys of one place, turned by each table that
the model has, are compared with the keys of the other place; what fits is the rotation, and if nothing does, there is
none by which the KV could be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_kv_kernels import rerotate_keys, rotation_table
from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.deviation import deviation, tolerance
from fused_kv_llm.model.geometry import Rotation

__all__ = ["ProbedKV", "find_rotations"]


@dataclass(frozen=True, slots=True)
class ProbedKV:
    """What the same tokens have in a cache when they stand at one place.

    Parameters
    ----------
    start : int
        Position of the first token.
    keys, values : Tensor
        ``[L, Hkv, n, D]`` and ``[L, Hkv, n, Dv]``, as the model calls them.
    logits : Tensor
        float32 ``[n, vocabulary]``.
    """

    start: int
    keys: Tensor
    values: Tensor
    logits: Tensor


def find_rotations(decoder: Any, probes: Sequence[ProbedKV], model_id: str) -> tuple[tuple[Rotation, ...], bool]:
    """Return the rotation of every layer, and whether it is the values that carry it.

    Parameters
    ----------
    decoder : torch.nn.Module
        Its buffers hold the frequencies.
    probes : sequence of ProbedKV
        The same tokens at several places.
    model_id : str
        For messages.

    Raises
    ------
    UnsupportedModelError
        If a layer's keys are not moved by any of the model's tables.
    """
    candidates = _candidates(decoder)
    limit = tolerance(probes[0].keys.dtype)
    gaps = [torch.stack([_gap(part, candidate, probes) for candidate in candidates]) for part in ("keys", "values")]
    swaps = bool((gaps[0][0] <= limit).all() and (gaps[1][0] > limit).any())
    turned, fixed = gaps[::-1] if swaps else gaps
    best = turned.min(dim=0)
    if not bool(best.indices.any()):
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: no layer of it rotates keys by position, and its positions "
            "cannot be set from outside, or it has none."
        )
    wrong = ((best.values > limit) | (fixed[0] > limit)).nonzero()[:, 0].tolist()
    if wrong:
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: the KV of layer {wrong[0]} cannot be moved. The same tokens at "
            f"another place have keys that no rotation of the model's own turns into these (off by "
            f"{best.values[wrong[0]]:.2f}, or by {fixed[0][wrong[0]]:.2f} in the values; rounding explains {limit}). "
            "Learned or added positions, and norms behind the rotation, do that."
        )
    return tuple(candidates[number] for number in best.indices.tolist()), swaps


def _candidates(decoder: Any) -> list[Rotation]:
    """Return no rotation, and every table of the model in both layouts and directions."""
    tables: dict[bytes, Tensor] = {}
    for name, buffer in decoder.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1:
            table = buffer.detach().to("cpu", torch.float32)
            tables.setdefault(table.numpy().tobytes(), table)
    found = [Rotation(torch.zeros(1))]
    for table in tables.values():
        found += [Rotation(sign * table, layout) for layout in (False, True) for sign in (1.0, -1.0)]
    return found


def _gap(part: str, candidate: Rotation, probes: Sequence[ProbedKV]) -> Tensor:
    """Return the largest deviation over the probes, by layer."""
    first: Tensor = getattr(probes[0], part)
    if 2 * candidate.inv_freq.shape[0] > first.shape[-1]:
        return torch.full(first.shape[:1], torch.inf)
    gaps = []
    for other in probes[1:]:
        distance = torch.tensor([other.start - probes[0].start])
        table = rotation_table(distance, candidate.inv_freq, candidate.interleaved)
        moved = rerotate_keys(first, table.to(first.device))
        gaps.append(deviation(*(x.transpose(1, 2).flatten(2) for x in (moved, getattr(other, part)))).cpu())
    return torch.stack(gaps).amax(0)
