"""What computing tokens costs on this machine: RAGCache's T(cached, new), measured once and kept beside the store."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import LoadedModel, ModelOwner, PackedChunk, PrefixKV, compute_prefix, prefill_packed
from fused_kv_llm.paths import write_atomically
from fused_kv_llm.store import RecomputeCost

__all__ = ["WORTH_MEASURING_TOKENS", "PrefillCost"]

WORTH_MEASURING_TOKENS = 20_000
"""New tokens of an ingestion beside which measuring does not matter: it computes a seventh of them at most."""

_VERSION = 1
_LONGEST = 512
_SHORTEST = 16
_REPEATS = 2
_log = logging.getLogger(__name__)


class PrefillCost:
    """What computing `new` tokens behind `cached` ones costs, as a number of tokens.

    The unit is what a token costs in a chunk of 512 that is computed alone. So costs are the numbers of tokens until
    they are measured, and measured ones can stand beside them in one store.

    Parameters
    ----------
    loaded : LoadedModel
        Times are of its weights, dtype, device and number of threads.
    folder : Path
        The store's, where the times are kept. A file that cannot be used is as good as none.

    Attributes
    ----------
    seconds : RecomputeCost or None
        The times; None until they are measured.
    """

    def __init__(self, loaded: LoadedModel, folder: Path) -> None:
        self._loaded = loaded
        self._machine = _machine(loaded)
        name = hashlib.sha256("|".join(self._machine).encode()).hexdigest()[:16]
        self._path = folder / f"prefill-cost-{name}.json"
        self.seconds = _read(self._path, self._machine)

    def __call__(self, cached: float, new: float) -> float:
        """Return the cost, at least that of one token."""
        if self.seconds is None:
            return new
        unit = self.seconds(0, _LONGEST) / _LONGEST
        return max(1.0, self.seconds(cached, new) / unit)

    def prefill_s(self, cached: int, new: int) -> float | None:
        """Return the seconds that computing `new` tokens behind `cached` ones takes on an idle machine.

        Longer prompts than were timed are put together from pieces that were: each of at most 512 tokens behind all
        before it, whose cost grows with their number as it does between the times, and never shrinks.

        Returns
        -------
        float or None
            None before the times are measured.
        """
        if self.seconds is None:
            return None
        longest = int(self.seconds.new_tokens[-1])
        total_s = 0.0
        for begin in range(0, new, longest):
            tokens = min(longest, new - begin)
            alone_s = self.seconds(0, tokens)
            total_s += max(alone_s, self.seconds(cached + begin, tokens))
        return total_s

    def measure(self, owner: ModelOwner) -> None:
        """Measure the times, unless they are known, piece by piece between the steps of requests.

        Parameters
        ----------
        owner : ModelOwner
            Computes the pieces.
        """
        longest = min(_LONGEST, self._loaded.geometry.context_length // 2)
        if self.seconds is not None or longest < _SHORTEST:
            return
        cached, new = (0, longest), (longest // 32 or 1, longest // 4, longest)
        ids = _ids(self._loaded, longest)
        prefixes = [owner.run(partial(compute_prefix, self._loaded, ids[:count]), count) for count in cached]
        # The first forward of a shape is slower.
        owner.run(partial(self._time, prefixes[0], ids[: new[0]]), new[0])
        table = [
            # What runs beside it makes some times too long, and never more tokens cheaper.
            list(accumulate((owner.run(partial(self._time, one, ids[:count]), count) for count in new), max))
            for one in prefixes
        ]
        self.seconds = RecomputeCost(cached, new, table)
        about = {"version": _VERSION, "machine": self._machine, "cached_tokens": cached, "new_tokens": new}
        try:
            write_atomically(self._path, json.dumps({**about, "seconds": table}, indent=1).encode())
        except OSError as error:
            _log.warning("Times of prefills could not be kept in %s and are measured again: %s", self._path, error)

    def _time(self, prefix: PrefixKV, ids: tuple[int, ...]) -> float:
        seconds = []
        for _ in range(_REPEATS):
            _wait(self._loaded.device)
            started = time.perf_counter()
            prefill_packed(self._loaded, [PackedChunk(ids)], prefix)
            _wait(self._loaded.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds)


def _machine(loaded: LoadedModel) -> list[str]:
    """Return what times depend on."""
    device = loaded.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return [loaded.fingerprint, str(loaded.dtype), name, str(torch.get_num_threads())]


def _ids(loaded: LoadedModel, count: int) -> tuple[int, ...]:
    """Return ids that every model has."""
    most = loaded.model.get_input_embeddings().num_embeddings
    return tuple(place % most for place in range(count))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read(path: Path, machine: Sequence[str]) -> RecomputeCost | None:
    try:
        found: Any = json.loads(path.read_bytes())
        if found["version"] != _VERSION or found["machine"] != machine:
            return None
        cost = RecomputeCost(found["cached_tokens"], found["new_tokens"], found["seconds"])
        numbers = [float(x) for row in cost.seconds for x in row]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        _log.warning("Times of prefills in %s cannot be used and are measured again: %s", path, error)
        return None
    return cost if all(math.isfinite(x) and x > 0 for x in numbers) else None
