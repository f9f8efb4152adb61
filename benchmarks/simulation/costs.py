"""How long things take: fitted to a measured run, or from a model's shape and assumed hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .hardware import Hardware
from .shape import ModelShape

__all__ = ["Costs", "Work", "fitted", "roofline"]


@dataclass(frozen=True, slots=True)
class Work:
    """A part of a pass.

    Parameters
    ----------
    rows : float
        Rows that go through the model.
    pairs : float
        Keys that they attend to, summed over rows.
    placed : float
        Tokens whose stored KV is brought into the prompt.
    """

    rows: float
    pairs: float
    placed: float = 0.0

    def share(self, share: float) -> Work:
        """Return so much of it."""
        return Work(self.rows * share, self.pairs * share, self.placed * share)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, linear in what there is to do.

    Parameters
    ----------
    pass_s, row_s, pair_s, place_s : float
        Of a prompt's pass: alone, a row, a row and key, and a token whose stored KV is placed.
    probe_s, probe_token_s : float
        Of the probe, and for each chunk token that it scores.
    token_s, answer_s, key_s : float
        Of a step of next tokens: alone, an answer, and a key that it attends to.
    read_s, read_token_s : float
        To tokenise a prompt and find its chunks, in a thread.
    first_s : float
        Until a complete prompt's first token is out, the beginning of a request included.
    beside : float
        How many times as long a prompt's layers take that are computed in turns with answers' tokens.
    weights_s : float
        A pass takes no less than reading the weights, which rows share; 0 where `row_s` says it all.
    copies_beside : bool
        Whether stored KV is placed while others are computed, as on a GPU.
    may_pause : bool
        Whether a prompt is left between two layers, as on a CPU, and not cut into slices.
    """

    pass_s: float
    row_s: float
    pair_s: float
    place_s: float
    probe_s: float
    probe_token_s: float
    token_s: float
    answer_s: float
    key_s: float
    read_s: float
    read_token_s: float
    first_s: float
    beside: float = 1.0
    weights_s: float = 0.0
    copies_beside: bool = False
    may_pause: bool = True

    def prompt_s(self, work: Work) -> float:
        """Return what a prompt's pass takes alone."""
        computed = self.pass_s + max(self.weights_s, self.row_s * work.rows) + self.pair_s * work.pairs
        placed = self.place_s * work.placed
        return max(computed, placed) if self.copies_beside else computed + placed

    def probing_s(self, chunk_tokens: float) -> float:
        """Return what a probe takes that scores so many tokens."""
        return self.probe_s + self.probe_token_s * chunk_tokens if chunk_tokens else 0.0

    def tokens_s(self, answers: int, keys: float) -> float:
        """Return what the next tokens of so many answers take."""
        return self.token_s + self.answer_s * answers + self.key_s * keys if answers else 0.0

    def together_s(self, answers: int, keys: float, slice_: Work | None) -> float:
        """Return what a step takes that computes a prompt's slice beside answers."""
        if slice_ is None:
            return self.tokens_s(answers, keys)
        beside = max(0.0, self.tokens_s(answers, keys) - self.token_s)
        return self.prompt_s(slice_) + beside

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def roofline(shape: ModelShape, hardware: Hardware) -> Costs:
    """Return what a shape takes on hardware: operations, or bytes, whichever take longer."""
    row_s = shape.row_flops / hardware.flops_per_s
    weights_s = shape.weight_bytes / hardware.memory_bytes_per_s
    return Costs(
        pass_s=hardware.step_s,
        row_s=row_s,
        pair_s=shape.pair_flops / hardware.flops_per_s,
        place_s=shape.kv_bytes_per_token / hardware.host.bytes_per_s,
        probe_s=hardware.step_s + weights_s,
        # Anchors: a seventh of the tokens in a quarter of the layers, at most.
        probe_token_s=shape.pair_flops * 16 / hardware.flops_per_s / 7,
        token_s=hardware.step_s + weights_s,
        answer_s=row_s,
        key_s=shape.kv_bytes_per_token / hardware.memory_bytes_per_s,
        read_s=2e-3,
        read_token_s=2e-6,
        first_s=1e-3,
        weights_s=weights_s,
        copies_beside=True,
        may_pause=False,
    )


def fitted(run: dict[str, Any]) -> Costs:
    """Return what a measured run says, by least squares of relative errors; nothing is negative.

    Parameters
    ----------
    run : dict
        As ``calibrate`` writes it: ``prompts`` and ``steps``.
    """
    prompts, steps = run["prompts"], run["steps"]
    passes = _least_squares(
        [[1.0, one["rows"], one["pairs"], one["placed"]] for one in prompts], [one["fuse_s"] for one in prompts]
    )
    probed = [one for one in prompts if one["probe_s"] > 0]
    probe = _least_squares([[1.0, one["placed"]] for one in probed], [one["probe_s"] for one in probed])
    token = _least_squares([[1.0, one["answers"], one["keys"]] for one in steps], [one["step_s"] for one in steps])
    read = _least_squares([[1.0, one["prompt_tokens"]] for one in prompts], [one["align_s"] for one in prompts])
    first_s = float(np.median([max(0.0, one["ttft_s"] - one["known_s"]) for one in prompts]))
    return Costs(*passes, *probe, *token, *read, first_s)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Solve with relative errors; a column whose coefficient would be negative is left out."""
    table = np.asarray(rows, float)
    scale = np.maximum(np.abs(table).max(axis=0), 1e-12)
    weights = 1.0 / np.asarray(seconds)[:, None]
    used = list(range(table.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(table[:, used] / scale[used] * weights, np.ones(len(rows)), rcond=None)
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(used) == 1:
            break
        used.pop(worst)
    whole = np.zeros(table.shape[1])
    whole[used] = np.maximum(found, 0.0) / scale[used]
    return [float(value) for value in whole]
