"""What ``kv_connector_extra_config`` says: where the store is, and how much of a prompt one of its files holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fused_kv_llm.config import DEFAULT_POLICY
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import KVStore

__all__ = ["ConnectorSettings"]


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The connector's options; those of the store are described in ``KVStore``.

    Parameters
    ----------
    kv_dir : str
        The store's folder.
    span_tokens : int
        Tokens of a prompt that are stored, and found, together; rounded up to whole blocks of vLLM's. Fewer find more
        of a prompt and make more files.
    writes_waiting : int
        Spans that may wait to be written. While there are more, what is computed is not stored, with a warning:
        requests do not wait for the disk.
    disk_bytes, memory_bytes, policy, remote, remote_options
        As ``KVStore`` takes them. vLLM keeps KV in memory itself, so nothing is kept in the store's by default.
    """

    kv_dir: str
    span_tokens: int = 256
    writes_waiting: int = 64
    disk_bytes: int | str | None = None
    memory_bytes: int | str = 0
    policy: str = DEFAULT_POLICY
    remote: str | None = None
    remote_options: dict[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the values that the store does not check."""
        if not isinstance(self.kv_dir, str) or not self.kv_dir:
            raise ConfigError(f"kv_dir={self.kv_dir!r} is not the path of a folder")
        for name in ("span_tokens", "writes_waiting"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} is not a whole number from 1")

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> ConnectorSettings:
        """Read the options from vLLM's configuration.

        Raises
        ------
        ConfigError
            One is unknown, missing, or cannot work.
        """
        names = {one.name for one in fields(cls)}
        if unknown := sorted(set(extra_config) - names):
            raise ConfigError(
                f"kv_connector_extra_config has unknown options: {', '.join(unknown)}. Known are "
                f"{', '.join(sorted(names))}."
            )
        if "kv_dir" not in extra_config:
            raise ConfigError('kv_connector_extra_config needs "kv_dir": the folder in which KV is stored.')
        return cls(**extra_config)

    def span_blocks(self, block_tokens: int) -> int:
        """Return how many of vLLM's blocks a span has."""
        return -(-self.span_tokens // block_tokens)

    def open_store(self) -> KVStore:
        """Open the store; raises as ``KVStore`` does."""
        return KVStore(
            self.kv_dir,
            memory_bytes=self.memory_bytes,
            disk_bytes=self.disk_bytes,
            policy=self.policy,
            remote=self.remote,
            remote_options=self.remote_options,
        )
