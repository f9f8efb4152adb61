"""How much is computed at once; the defaults follow the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from fused_kv_llm.config import EngineConfig

__all__ = ["Limits", "limits_of"]

_HOST = torch.device("cpu")
_SHARE_OF_MEMORY = 0.25
_SHARE_OF_PREFIXES = 0.125
_SEQUENCES = {"cpu": 16, "cuda": 128}
# With few rows, the weights are read once for little; with many, answers that are being written wait long for a step.
_ROWS_PER_CORE = 48
_ROWS_ON_A_GPU = 2048
# One layer of so many takes about as long as the next tokens of a few answers.
_LAYER_ROWS_PER_CORE = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is computed at once.

    Parameters
    ----------
    num_seqs : int
        Requests whose KV is in memory.
    batched_rows : int
        Rows that a step computes while answers are being written; a chunk's recomputed tokens are not cut.
    layer_rows : int
        The same, of a prompt whose passes may be left between two layers.
    pool_bytes : int
        KV of these requests. One request is always let in.
    queued : int
        Requests that wait.
    reorder_window : int
        How many that came later may be taken from the queue before one that waits.
    share_chunk_kv : {"auto", "always", "never"}
        Whether requests that decode share the KV of their chunks.
    prefix_bytes : int
        KV that requests have left for later ones; beside `pool_bytes`.
    load_timeout_s : float
        For how long a request waits for stored KV of which nothing comes.
    retries : int
        How often in a row a request is tried again.
    prefix_host_bytes : int
        The same on the host, for what has to leave a GPU; 0 on a CPU.
    """

    num_seqs: int
    batched_rows: int
    layer_rows: int
    pool_bytes: int
    queued: int
    reorder_window: int
    share_chunk_kv: Literal["auto", "always", "never"]
    prefix_bytes: int
    retries: int
    load_timeout_s: float
    prefix_host_bytes: int = 0


def limits_of(config: EngineConfig, device: torch.device) -> Limits:
    """Return the limits of a configuration, those that it leaves open after the machine."""
    on_gpu = device.type == "cuda"
    cores = max(1, torch.get_num_threads())
    keeps_prefixes = config.prefix_cache_bytes is None or int(config.prefix_cache_bytes) > 0
    rows = _ROWS_ON_A_GPU if on_gpu else _ROWS_PER_CORE * cores
    return Limits(
        num_seqs=config.max_num_seqs or _SEQUENCES["cuda" if on_gpu else "cpu"],
        batched_rows=config.max_batched_rows or rows,
        layer_rows=config.max_batched_rows or _LAYER_ROWS_PER_CORE * cores,
        pool_bytes=_bytes_of(config.kv_pool_bytes, _SHARE_OF_MEMORY, device),
        queued=config.max_queued,
        reorder_window=config.reorder_window,
        share_chunk_kv=config.share_chunk_kv,
        prefix_bytes=_bytes_of(config.prefix_cache_bytes, _SHARE_OF_PREFIXES, device),
        load_timeout_s=config.load_timeout_s,
        retries=config.max_step_retries,
        prefix_host_bytes=int(_SHARE_OF_PREFIXES * _free_bytes(_HOST)) if on_gpu and keeps_prefixes else 0,
    )


def _bytes_of(given: int | str | None, share: float, device: torch.device) -> int:
    return int(share * _free_bytes(device)) if given is None else int(given)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 * 2**30
