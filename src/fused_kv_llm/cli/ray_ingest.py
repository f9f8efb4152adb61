"""``fused-kv ingest --ray``: the same passages and the same index, with the KV computed on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from fused_kv_llm.cli.options import IDENTITY_OPTIONS
from fused_kv_llm.cli.terminal import doing, out, quiet_libraries
from fused_kv_llm.config import EngineConfig
from fused_kv_llm.errors import ConfigError

__all__ = ["RayChoice", "ingest_on_ray"]


@dataclass(frozen=True, slots=True)
class RayChoice:
    """What was asked for of a Ray cluster.

    Parameters
    ----------
    address : str or None
        Of the cluster; None starts Ray on this machine.
    actors : int or None
        Actors that hold the model; None is as many as fit.
    cpus, gpus : float
        Of each.
    prune : bool
        Whether what is stored and is not among the passages is deleted.
    """

    address: str | None = None
    actors: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    prune: bool = False


def ingest_on_ray(paths: Sequence[Path], chunk_chars: int, choice: RayChoice, *, refresh: bool, **options: Any) -> None:
    """Read files on a cluster, store the KV of their passages in the shared store, and index the passages here.

    Parameters
    ----------
    paths : sequence of Path
        On a path that every worker sees.
    chunk_chars : int
    choice : RayChoice
    refresh : bool
        Whether passages whose neighbours have changed are preprocessed again.
    **options
        Of ``EngineConfig``; `remote` is the shared store.

    Raises
    ------
    ConfigError
        If there is no shared store.
    """
    if options.get("remote") is None:
        raise ConfigError(
            "--ray stores into a store that all workers reach: name it with --remote (s3://bucket/prefix, "
            "redis://host:6379/0, file:///mnt/share) or FUSED_KV_REMOTE"
        )
    config = EngineConfig(**options)
    # At once, since starting Ray takes seconds.
    out.print(f"Reading {escape(', '.join(map(str, paths)))} on Ray", highlight=False, soft_wrap=True)
    from fused_kv_llm.demo import MiniLM, PassageIndex
    from fused_kv_llm.scale import ActorResources, build_kv_cache_distributed, read_files, running_ray

    quiet_libraries()
    given = {name: value for name, value in options.items() if name not in ("model", "remote", "kv_dir")}
    resources = ActorResources(choice.actors, choice.cpus, choice.gpus)
    with running_ray(choice.address):
        passages = read_files(list(paths), chunk_chars=chunk_chars)
        out.print(f"{len(passages)} passages, files read: {len({passage.source for passage in passages})}")
        report = build_kv_cache_distributed(
            [passage.text for passage in passages],
            config.model,
            config.remote,
            actors=resources,
            kv_dir=config.kv_dir,
            refresh=refresh,
            prune=choice.prune,
            **given,
        )
    out.print(report.summary(), highlight=False, soft_wrap=True)
    with doing("Indexing the passages"):
        made = {name: value for name, value in config if name in IDENTITY_OPTIONS}
        made |= {"dtype": report.dtype, "kv_dtype": report.kv_dtype}
        index = PassageIndex.update(config.kv_dir, passages, embedder=MiniLM(), **made)
    asking = f"fused-kv ask QUESTION --kv-dir {config.kv_dir} --remote URL"
    out.print(f"{len(index.passages)} passages can be asked about: {asking}", soft_wrap=True)
