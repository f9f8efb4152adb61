"""The remote tier: an object store that several machines share, behind five methods.

Objects are the files of the disk tier under the same names, so an encrypted store's objects are encrypted. Nothing that
comes from a remote tier is used before it is verified.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fused_kv_llm.errors import ConfigError, MissingExtraError, StoreUnavailableError
from fused_kv_llm.store.remote.url import public_url, scrub

__all__ = ["RemoteFiles", "RemoteTier", "open_remote"]


_log = logging.getLogger(__name__)
# What backends call that which changes with an object's content, surest first.
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated", "created")


class RemoteTier(Protocol):
    """Named objects on another machine; every method raises StoreUnavailableError if it fails."""

    url: str
    identity: str
    """What tells it from other tiers; without passwords."""

    def get(self, names: Sequence[str], first_nbytes: int | None = None) -> dict[str, bytes]:
        """Return those objects that are there, or their beginnings, in one call of the backend."""

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store an object, completely or not at all."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; missing ones are ignored."""

    def sizes(self) -> dict[str, int]:
        """Return the names and sizes of all objects."""

    def versions(self) -> dict[str, tuple[int, str]]:
        """Return the names of all objects with size and version, "" if unknown; another version is another content."""

    def close(self) -> None:
        """Close connections."""


def open_remote(url: str, options: dict[str, Any] | None = None) -> RemoteTier:
    """Open a remote tier.

    Parameters
    ----------
    url : str
        ``redis://`` or ``rediss://`` (Redis, Valkey), or whatever fsspec knows: ``s3://bucket/prefix``,
        ``file:///mnt/share``, ``gs://...``.
    options : dict or None
        Further arguments of the backend: ``endpoint_url``, credentials, ...

    Raises
    ------
    ConfigError
        The URL is not one.
    MissingExtraError
        The backend's package is not installed.
    StoreUnavailableError
        It cannot be reached.
    """
    if not isinstance(url, str) or "://" not in url:
        raise ConfigError(
            f"remote={public_url(url)!r} is not a URL such as s3://bucket/prefix, file:///mnt/share or "
            "redis://host:6379/0"
        )
    if url.startswith(("redis://", "rediss://")):
        from fused_kv_llm.store.remote.redis_tier import RemoteRedis

        return RemoteRedis(url, options or {})
    return RemoteFiles(url, options or {})


class RemoteFiles:
    """A remote tier on anything fsspec reaches.

    Parameters
    ----------
    url : str
    options : dict
        Arguments of the file system.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtraError("fsspec", "remote") from error
        self.url = public_url(url)
        self.identity = f"{self.url.rstrip('/')} {_endpoint(options)}"
        self._scrub = partial(scrub, url=url, options=options)
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options)
            self._root = root.rstrip("/")
            self._fs.makedirs(self._root, exist_ok=True)
        except ImportError as error:
            scheme = url.partition("://")[0]
            raise MissingExtraError(f"the fsspec backend of {scheme}", "s3" if scheme == "s3" else "remote") from error
        except ValueError as error:
            # "from None": the cause may quote a password. The same holds for every error below.
            raise ConfigError(f"remote={self.url!r} cannot work: {self._scrub(str(error))}") from None
        except Exception as error:  # whatever a backend raises
            raise self._unavailable(error) from None

    def get(self, names: Sequence[str], first_nbytes: int | None = None) -> dict[str, bytes]:
        """Return those objects that are there, or their beginnings."""
        paths = {self._path(name): name for name in names}
        try:
            # Files may have changed since they were listed.
            self._fs.invalidate_cache()
            if first_nbytes is None:
                found = self._fs.cat(list(paths), on_error="return") if paths else {}
            else:
                ends = [first_nbytes] * len(paths)
                parts = self._fs.cat_ranges(list(paths), [0] * len(paths), ends, on_error="return")
                found = dict(zip(paths, parts, strict=True))
        except Exception as error:
            raise self._unavailable(error) from None
        for result in found.values():
            if isinstance(result, Exception) and not isinstance(result, FileNotFoundError):
                if not _is_odd(result):
                    raise self._unavailable(result) from None
                _log.warning("An object on %s is not one of a store's and is passed over: %r", self.url, result)
        return {paths[path]: data for path, data in found.items() if isinstance(data, bytes)}

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store an object."""
        path = self._path(name)
        try:
            if "file" in self._fs.protocol:
                self._put_file(path, parts)
            else:
                self._fs.pipe_file(path, b"".join(parts))
        except Exception as error:
            raise self._unavailable(error) from None

    def _put_file(self, path: str, parts: Sequence[memoryview]) -> None:
        # Object stores show an object once it is complete; in a folder a rename does that.
        temp = f"{path}.{secrets.token_hex(4)}.part"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
        except BaseException:
            os.unlink(temp)
            raise

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for name in names:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._unavailable(error) from None

    def sizes(self) -> dict[str, int]:
        """Return names and sizes of all objects."""
        return {name: nbytes for name, (nbytes, _) in self.versions().items()}

    def versions(self) -> dict[str, tuple[int, str]]:
        """Return names, sizes and versions of all objects."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise self._unavailable(error) from None
        # What lies further down is another store's.
        return {
            path.rpartition("/")[2]: (int(about["size"] or 0), _version(about))
            for path, about in found.items()
            if path.rpartition("/")[0] == self._root
        }

    def close(self) -> None:
        """Do nothing: fsspec shares its connections."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _unavailable(self, error: BaseException) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"The remote tier {self.url} cannot be used: {self._scrub(repr(error))}. Check its address and credentials."
        )


def _version(about: Mapping[str, Any]) -> str:
    found = next((str(about[name]) for name in _VERSIONS if about.get(name)), "")
    # A file that replaces another one has another number, however close their times are.
    return f"{found} {about['ino']}" if "ino" in about else found


def _is_odd(error: Exception) -> bool:
    """Whether an error is about one object alone: a folder, or too short for the range that was asked for."""
    return isinstance(error, IsADirectoryError) or (
        isinstance(error, OSError) and error.errno == errno.EINVAL and "range" in str(error).lower()
    )


def _endpoint(options: Mapping[str, Any]) -> str:
    """Return the server that options name, since equal buckets of two servers are two."""
    client = options.get("client_kwargs")
    inner = client.get("endpoint_url") if isinstance(client, Mapping) else None
    return public_url(str(options.get("endpoint_url") or inner or ""))
