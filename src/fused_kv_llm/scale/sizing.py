"""How many bytes, how much bandwidth and how many replicas a corpus and its users need: an estimate, by arithmetic.

The arithmetic is a roofline: operations or bytes, whichever take longer. ``benchmarks/simulation`` simulates the same
machines request by request with the library's own scheduler, and a test holds the two against each other.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fused_kv_llm.errors import ConfigError

from .sizing_inputs import Machine, ModelGeometry, Workload
from .zipf import lru_hit_share

__all__ = ["Sizing", "size"]

_MOST_REPLICAS = 100_000


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is needed.

    Parameters
    ----------
    chunk_bytes, store_bytes : float
        Stored KV of a chunk and of the corpus, without preprocessing's sidecars, which add up to as much again.
    replicas : int
    limit : str
        What a replica comes up against first: ``"compute"``, which includes bringing KV to the device, ``"disk"`` or
        ``"remote"``.
    requests_per_s_each : float
        What a replica can answer at most.
    at_once : int
        Answers that it writes at once then.
    service_s : float
        Seconds of its device that a request takes then.
    memory_share, disk_share, remote_share : float
        Of loaded bytes, by the tier they are found in, with routing by chunk.
    memory_share_random : float
        The first with random routing.
    loaded_bytes_per_request : float
    disk_bytes_per_s, remote_bytes_per_s : float
        Of all replicas together, at the rate asked for.
    """

    chunk_bytes: float
    store_bytes: float
    replicas: int
    limit: str
    requests_per_s_each: float
    at_once: int
    service_s: float
    memory_share: float
    disk_share: float
    remote_share: float
    memory_share_random: float
    loaded_bytes_per_request: float
    disk_bytes_per_s: float
    remote_bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def size(work: Workload, model: ModelGeometry, machine: Machine) -> Sizing:
    """Return what a corpus and its users need.

    Parameters
    ----------
    work : Workload
    model : ModelGeometry
    machine : Machine
        Of each replica.

    Returns
    -------
    Sizing

    Raises
    ------
    ConfigError
        If not one request fits on the device, or more than a hundred thousand replicas were needed.
    """
    at_once = _at_once(work, model, machine)
    service_s = _service_s(work, model, machine, at_once)
    loaded = work.chunks_per_request * work.chunk_tokens * model.stored_bytes
    replicas = 1
    while True:
        shares = _shares(work, model, machine, replicas)
        most = _most_per_s(loaded, shares, service_s, machine)
        limit = min(most, key=lambda name: most[name])
        needed = math.ceil(work.requests_per_s / (work.utilisation * most[limit]) - 1e-9)
        if needed <= replicas:
            break
        # More replicas hold more in memory together, so each can do no less: the count rises to a fixed point.
        replicas = replicas + max(1, (needed - replicas) // 2)
        if replicas > _MOST_REPLICAS:
            raise ConfigError(f"More than {_MOST_REPLICAS} replicas would be needed: {limit} limits each of them.")
    memory, disk, remote = shares
    return Sizing(
        chunk_bytes=work.chunk_tokens * model.stored_bytes,
        store_bytes=work.chunks * work.chunk_tokens * model.stored_bytes,
        replicas=replicas,
        limit=limit,
        requests_per_s_each=most[limit],
        at_once=at_once,
        service_s=service_s,
        memory_share=memory,
        disk_share=disk,
        remote_share=remote,
        memory_share_random=_shares(work, model, machine, 1)[0],
        loaded_bytes_per_request=loaded,
        disk_bytes_per_s=work.requests_per_s * loaded * disk,
        remote_bytes_per_s=work.requests_per_s * loaded * remote,
    )


def _at_once(work: Workload, model: ModelGeometry, machine: Machine) -> int:
    tokens = work.prompt_tokens + work.answer_tokens
    fit = int(machine.device_kv_bytes // (tokens * model.device_bytes))
    if fit < 1:
        raise ConfigError(
            f"A request of {tokens:.0f} tokens has {tokens * model.device_bytes:.3g} bytes of KV and does not fit into "
            f"device_kv_bytes={machine.device_kv_bytes:.3g}."
        )
    return min(work.most_at_once, fit)


def _service_s(work: Workload, model: ModelGeometry, machine: Machine, at_once: int) -> float:
    """Return the device's seconds of a request, beside as many others as it holds."""
    row_s = 2 * model.params / machine.flops_per_s
    pair_s = 4 * model.layers * model.heads * model.head_dim / machine.flops_per_s
    alone_s = machine.step_s + model.params * model.weight_bytes / machine.device_bytes_per_s
    chunk_tokens = work.chunks_per_request * work.chunk_tokens
    recomputed = work.recompute_ratio * chunk_tokens
    # Recomputed rows see half of the prompt on average, the question all of it.
    pairs = recomputed * work.prompt_tokens / 2 + work.question_tokens * work.prompt_tokens
    prompt_s = machine.step_s + max(alone_s - machine.step_s, (recomputed + work.question_tokens) * row_s)
    prompt_s += pairs * pair_s
    placed_s = chunk_tokens * model.device_bytes / machine.load_bytes_per_s
    probe_s = alone_s if recomputed else 0.0
    key_s = model.device_bytes / machine.device_bytes_per_s
    token_s = alone_s / at_once + row_s + (work.prompt_tokens + work.answer_tokens / 2) * key_s
    return max(prompt_s, placed_s) + probe_s + work.answer_tokens * token_s


def _shares(work: Workload, model: ModelGeometry, machine: Machine, replicas: int) -> tuple[float, float, float]:
    """Return the shares of loaded bytes that are in memory, on the disk, and in the shared store."""
    chunk_bytes = work.chunk_tokens * model.stored_bytes
    # Routing by chunk gives each replica its part of the corpus.
    memory, disk = (
        lru_hit_share(work.chunks, work.zipf_exponent, replicas * held / chunk_bytes)
        for held in (machine.memory_bytes, max(machine.memory_bytes, machine.disk_bytes))
    )
    return memory, disk - memory, 1.0 - disk


def _most_per_s(
    loaded: float, shares: tuple[float, float, float], service_s: float, machine: Machine
) -> dict[str, float]:
    """Return how many requests a replica can answer, by what limits it."""
    _, disk, remote = shares

    def most(rate: float, share: float) -> float:
        return rate / (loaded * share) if share > 0 else math.inf

    return {
        "compute": 1 / service_s,
        # What comes from the shared store is written to the disk, and read from there.
        "disk": most(machine.disk_bytes_per_s, disk + remote),
        "remote": most(machine.remote_bytes_per_s, remote),
    }
