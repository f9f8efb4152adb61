"""Every exception and warning the project raises, in one tree.

::

    FusedKVError
    ├── ConfigError (ValueError)          an option has a value that cannot work
    ├── MissingExtraError (ImportError)   an optional package is not installed
    ├── CorpusError (ValueError)          there is nothing to ingest
    ├── ModelError
    │   ├── ModelNotFoundError            no such alias, path or hub id
    │   ├── ModelFileError                a file of it is damaged, foreign, or cannot be converted
    │   ├── ModelChangedError             it is not the one that its stored KV was computed with
    │   └── UnsupportedModelError         its attention or its positions cannot be moved
    ├── PromptError (ValueError)
    │   └── PromptTooLongError            longer than the model's context
    ├── RequestError                      a request was given up before its answer was complete
    │   ├── QueueFullError                too many requests wait
    │   ├── DeadlineError (TimeoutError)  it was not answered in the time it had
    │   ├── RequestCancelledError         its caller cancelled it
    │   ├── StepFailedError               computing it failed, as often as it was tried
    │   └── EngineClosedError (StoreError) its engine was closed
    └── StoreError
        ├── ReadTimeoutError              a read of a chunk does not come back
        ├── StoreUnavailableError         the folder cannot be used
        │   └── IndexDamagedError         its index is damaged, or another release's
        ├── StoreFullError                the disk or the budget is full
        └── ChunkDamagedError             a file is truncated, altered or foreign
            └── ChunkKeyError             it was not written with the key that was given
    FusedKVWarning (UserWarning)          the answer is right, something is slower than it could be
"""

from __future__ import annotations

__all__ = [
    "ChunkDamagedError",
    "ChunkKeyError",
    "ConfigError",
    "CorpusError",
    "DeadlineError",
    "EngineClosedError",
    "FusedKVError",
    "FusedKVWarning",
    "IndexDamagedError",
    "MissingExtraError",
    "ModelChangedError",
    "ModelError",
    "ModelFileError",
    "ModelNotFoundError",
    "PromptError",
    "PromptTooLongError",
    "QueueFullError",
    "ReadTimeoutError",
    "RequestCancelledError",
    "RequestError",
    "StepFailedError",
    "StoreError",
    "StoreFullError",
    "StoreUnavailableError",
    "UnsupportedModelError",
    "VariantDamagedError",
]


class FusedKVError(Exception):
    """Base class of every error raised by this project."""


class ConfigError(FusedKVError, ValueError):
    """An option has a value that cannot work."""


class MissingExtraError(FusedKVError, ImportError):
    """An optional package is not installed.

    Parameters
    ----------
    package : str
        The distribution that could not be imported.
    extra : str or None
        The extra of ``fused-kv-llm`` that brings it; None if none does.
    reason : str
        What it is needed for.
    """

    def __init__(self, package: str, extra: str | None = None, reason: str = "") -> None:
        self.package = package
        self.extra = extra
        before = f"{reason}, and the" if reason else "The"
        wanted = package if extra is None else f"'fused-kv-llm[{extra}]'"
        super().__init__(f"{before} package {package!r} is not installed. Install it with: pip install {wanted}")


class CorpusError(FusedKVError, ValueError):
    """There is nothing to ingest, or what was given is not text."""


class ModelError(FusedKVError):
    """Base class of the errors about a model."""


class ModelNotFoundError(ModelError):
    """No model has that alias, local path or hub id."""


class ModelFileError(ModelError):
    """A file of the model is damaged, of another format, or cannot be converted here."""


class UnsupportedModelError(ModelError):
    """The model's attention or positions do not allow chunk KV to be moved."""


class ModelChangedError(ModelError):
    """The model is not, or does not compute, what its stored KV was computed with."""


class PromptError(FusedKVError, ValueError):
    """A prompt cannot be used."""


class PromptTooLongError(PromptError):
    """The prompt does not fit in the model's context."""


class RequestError(FusedKVError):
    """A request was given up before its answer was complete."""


class QueueFullError(RequestError):
    """Too many requests wait; try again later."""


class DeadlineError(RequestError, TimeoutError):
    """A request was not answered in the time it had."""


class RequestCancelledError(RequestError):
    """A request was cancelled by its caller."""


class StepFailedError(RequestError):
    """Computing a request failed as often as it was tried; its cause is the last error."""


class IngestionFailedError(FusedKVError):
    """A batch of a distributed ingestion could not be computed; what was stored before stays stored."""


class StoreError(FusedKVError):
    """Base class of the errors about a chunk-KV store."""


class EngineClosedError(RequestError, StoreError):
    """The engine of a request was closed, and with it its store."""


class ReadTimeoutError(StoreError, TimeoutError):
    """Another thread reads a chunk, and does not come back.

    Parameters
    ----------
    key : str
        The key of the chunk.
    waited_s : float
        For how many seconds it was waited for.
    """

    def __init__(self, key: str, waited_s: float) -> None:
        self.key = key
        super().__init__(
            f"Another thread has been reading the stored KV of chunk {key[:16]} for more than {waited_s:g} s. "
            "Its disk, or the machine that it is on, does not answer."
        )


class StoreUnavailableError(StoreError):
    """The store's folder cannot be opened, created or written."""


class IndexDamagedError(StoreUnavailableError):
    """The index of a store is damaged or of another release; the files are not, and a new one is made of them."""


class StoreFullError(StoreError):
    """The disk, or the store's budget, cannot hold what should be written."""


class ChunkDamagedError(StoreError):
    """A chunk-KV file is truncated, altered or foreign.

    Parameters
    ----------
    key : str
        The key of the chunk.
    reason : str
        What was found.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason
        super().__init__(f"The stored KV of chunk {key[:16]} is damaged: {reason}")


class VariantDamagedError(ChunkDamagedError):
    """A variant of a chunk's KV cannot be used; the chunk itself can.

    Parameters
    ----------
    key : str
        The key of the chunk.
    name : str
        The name of the variant.
    reason : str
        What was found.
    """

    def __init__(self, key: str, name: str, reason: str) -> None:
        super().__init__(key, reason)
        self.name = name
        self.args = (f"The variant {name} of chunk {key[:16]} is damaged and its plain KV was used instead: {reason}",)


class ChunkKeyError(ChunkDamagedError):
    """A chunk-KV file was not written with the encryption key that was given, or without one.

    Parameters
    ----------
    key : str
        The key of the chunk.
    reason : str
        What was found.
    plain : bool
        Whether the file is not encrypted at all.
    """

    def __init__(self, key: str, reason: str, *, plain: bool = False) -> None:
        self.plain = plain
        super().__init__(key, reason)


class FusedKVWarning(UserWarning):
    """The result is right, but something is slower or smaller than it could be."""
