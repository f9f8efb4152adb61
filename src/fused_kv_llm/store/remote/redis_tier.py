"""The remote tier in a Redis or Valkey server."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from fused_kv_llm.errors import ConfigError, MissingExtraError, StoreUnavailableError
from fused_kv_llm.store.remote.url import public_url, scrub

__all__ = ["RemoteRedis"]

_PREFIX = "fused-kv:"
# A file's length and the checksum of its header are among them.
_VERSION_NBYTES = 64
_log = logging.getLogger(__name__)


class RemoteRedis:
    """Objects as values under ``fused-kv:<name>``.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host:port/database``.
    options : dict
        Arguments of ``redis.Redis``, and ``prefix`` of the keys.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtraError("redis", "redis") from error
        settings = dict(options)
        self._prefix = settings.pop("prefix", _PREFIX)
        self.url = public_url(url)
        self.identity = f"{self.url.rstrip('/')} {self._prefix}"
        self._scrub = partial(scrub, url=url, options=options)
        self._error = redis.RedisError
        try:
            self._client: Any = redis.Redis.from_url(url, **settings)
            self._client.ping()
        except ValueError as error:
            # "from None": the cause may quote the password. The same holds for every error below.
            raise ConfigError(f"remote={self.url!r} cannot work: {self._scrub(str(error))}") from None
        except redis.RedisError as error:
            raise self._unavailable(error) from None

    def get(self, names: Sequence[str], first_nbytes: int | None = None) -> dict[str, bytes]:
        """Return those objects that are there, or their beginnings."""
        if not names:
            return {}
        keys = [self._prefix + name for name in names]
        try:
            if first_nbytes is None:
                found = self._client.mget(keys)
            else:
                with self._client.pipeline(transaction=False) as pipeline:
                    for key in keys:
                        pipeline.getrange(key, 0, first_nbytes - 1)
                    answers = pipeline.execute(raise_on_error=False)
                found = [self._checked(part) or None for part in answers]
        except self._error as error:
            raise self._unavailable(error) from None
        return {name: data for name, data in zip(names, found, strict=True) if data is not None}

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store an object."""
        try:
            self._client.set(self._prefix + name, b"".join(parts))
        except self._error as error:
            raise self._unavailable(error) from None

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        keys = [self._prefix + name for name in names]
        try:
            if keys:
                self._client.delete(*keys)
        except self._error as error:
            raise self._unavailable(error) from None

    def sizes(self) -> dict[str, int]:
        """Return names and sizes of all objects."""
        return {name: nbytes for name, (nbytes, _) in self.versions().items()}

    def versions(self) -> dict[str, tuple[int, str]]:
        """Return names, sizes and versions of all objects; a version is the beginning, with the header's checksum."""
        try:
            keys = [key for key in self._client.scan_iter(self._prefix + "*") if _is_text(key)]
            with self._client.pipeline(transaction=False) as pipeline:
                for key in keys:
                    pipeline.strlen(key)
                    pipeline.getrange(key, 0, _VERSION_NBYTES - 1)
                answers = pipeline.execute(raise_on_error=False)
            checked = [self._checked(answer) for answer in answers]
        except self._error as error:
            raise self._unavailable(error) from None
        return {
            key.decode().removeprefix(self._prefix): (nbytes, beginning.hex())
            for key, nbytes, beginning in zip(keys, checked[::2], checked[1::2], strict=True)
            if nbytes is not None and beginning is not None
        }

    def _checked(self, answer: Any) -> Any:
        """Return a server's answer; None, with a warning, if a key is no string, and so not one of a store's."""
        if not isinstance(answer, Exception):
            return answer
        if not str(answer).startswith("WRONGTYPE"):
            raise answer
        _log.warning("A key on %s is not one of a store's and is passed over: %s", self.url, answer)
        return None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _unavailable(self, error: BaseException) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"The remote tier {self.url} cannot be used: {self._scrub(repr(error))}. "
            "Check that the server runs and has room."
        )


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        _log.warning("A key of Redis is not one of a store's and is passed over: %r", key)
        return False
    return True
