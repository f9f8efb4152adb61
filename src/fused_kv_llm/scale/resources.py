"""What a distributed ingestion may use of a Ray cluster, and connecting to one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fused_kv_llm.config import is_whole
from fused_kv_llm.errors import ConfigError, FusedKVError, IngestionFailedError, MissingExtraError

__all__ = ["ActorResources", "import_ray", "ray_errors", "rows_of", "running_ray"]


@dataclass(frozen=True, slots=True)
class ActorResources:
    """How many actors hold the model, and what each of them takes.

    Parameters
    ----------
    count : int or None
        Actors; None is as many as the cluster has room for when the ingestion begins.
    cpus : float
        Cores of each; also the threads that it computes with.
    gpus : float
        GPUs of each. With a part of one, several share it.

    Raises
    ------
    ConfigError
        If a number cannot work.
    """

    count: int | None = None
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.count is not None and (not is_whole(self.count) or self.count < 1):
            raise ConfigError(f"count={self.count!r} is not a whole number of at least 1 (actors)")
        if not self.cpus > 0:
            raise ConfigError(f"cpus={self.cpus!r} is not a number of cores above 0")
        if not self.gpus >= 0:
            raise ConfigError(f"gpus={self.gpus!r} is not a number of GPUs of at least 0")

    def fitting(self, available: dict[str, float]) -> int:
        """Return how many actors are started in a cluster.

        Parameters
        ----------
        available : dict of str to float
            What ``ray.cluster_resources()`` says.

        Raises
        ------
        ConfigError
            If not even one fits and none was asked for by number: a cluster that grows by itself has to be told.
        """
        room = int(available.get("CPU", 0) / self.cpus)
        if self.gpus:
            room = min(room, int(available.get("GPU", 0) / self.gpus))
        if self.count is not None:
            return self.count
        if room < 1:
            raise ConfigError(
                f"No actor with {self.cpus:g} cores and {self.gpus:g} GPUs fits in this Ray cluster, which has "
                f"{available.get('CPU', 0):g} cores and {available.get('GPU', 0):g} GPUs. Ask for less, or for a "
                "number of actors (count) if the cluster grows by itself."
            )
        return room


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError("ray[data]", "ray") from error
    return ray


def rows_of(dataset: Any, doing: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set as its workers make them.

    Parameters
    ----------
    dataset : ray.data.Dataset
    doing : str
        What is being done, for the message of an error.

    Raises
    ------
    IngestionFailedError
        If workers fail; Ray has tried again those that died.
    FusedKVError
        What a worker has raised.
    """
    with ray_errors(doing):
        yield from dataset.iter_rows()


@contextmanager
def ray_errors(doing: str) -> Iterator[None]:
    """Raise errors of Ray's workers within the block as :func:`rows_of` does."""
    exceptions = import_ray().exceptions
    try:
        yield
    except exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, FusedKVError):
            raise cause from None
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise IngestionFailedError(f"{doing} on Ray failed: {last}") from error


@contextmanager
def running_ray(address: str | None) -> Iterator[Any]:
    """Connect to Ray, unless this process is connected; disconnect afterwards if it was not.

    Parameters
    ----------
    address : str or None
        Of a cluster, such as ``"auto"`` or ``"ray://head:10001"``; None starts Ray on this machine, where no address
        is in the environment's ``RAY_ADDRESS``.

    Yields
    ------
    module
        ``ray``.

    Raises
    ------
    IngestionFailedError
        If Ray cannot be started or reached.
    """
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except Exception as error:  # whatever Ray raises; a start that takes too long is a plain exception
            ray.shutdown()
            where = "started on this machine" if address is None else f"reached at {address!r}"
            raise IngestionFailedError(f"Ray could not be {where}: {error}") from error
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars
    # Beside ours, its bars would overwrite them. The dashboard shows what Ray Data does in either case.
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    try:
        yield ray
    finally:
        context.enable_progress_bars = before
        if started:
            ray.shutdown()
