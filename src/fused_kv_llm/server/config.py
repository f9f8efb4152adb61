"""The options of a server."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from fused_kv_llm.errors import ConfigError

from .quotas import Quota

__all__ = ["ServerConfig"]


class ServerConfig(BaseModel):
    """The options of a server, checked.

    Raises
    ------
    ConfigError
        If a value cannot work, or strangers could reach the server without a key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine, a key is required."""

    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes one that is free."""

    api_keys: dict[str, SecretStr] = Field(default_factory=dict)
    """Keys by the name of their tenant; tenants with equal documents do not see each other's. Without keys everybody
    who reaches the server may ask it."""

    quotas: dict[str, Quota] = Field(default_factory=dict)
    """Requests and tokens of a minute by the name of a tenant, ``default`` where there are no keys."""

    model_name: str | None = None
    """Name of the model for clients; by default what the engine calls it."""

    max_answer_tokens: int = Field(default=2048, ge=1)
    """Longest answer of requests that do not say how long it may be, in tokens."""

    max_choices: int = Field(default=16, ge=1)
    """Most answers of one request, over all its prompts."""

    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest body of a request."""

    body_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time between two parts of a body, in seconds."""

    body_bytes_per_s: int = Field(default=32 * 2**10, ge=1)
    """Slowest pace of a body, after ``body_timeout_s``."""

    max_bodies_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Most bytes of the bodies of all requests at once."""

    max_connections: int = Field(default=1000, ge=1)
    """Most connections. For a further one that makes room which has waited longest for its client; while all are
    answered it is refused."""

    max_head_bytes: int = Field(default=16 * 2**10, ge=1024)
    """Most bytes of a request's first line and headers that are kept while they are incomplete."""

    head_timeout_s: float = Field(default=10.0, gt=0)
    """Longest time until a request's head is complete, in seconds."""

    keep_alive_s: int = Field(default=5, ge=1)
    """Seconds for which a connection is kept for a next request."""

    max_unread_bytes: int = Field(default=128 * 2**10, ge=4096)
    """Bytes of an answer that wait for its client before no more are sent."""

    write_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after which a client that does not read its answer is given up, and its request cancelled."""

    request_timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is given up; None waits."""

    ttft_padding: float | None = Field(default=None, ge=1, le=100)
    """Answers begin at multiples of so many times the estimated time of a full prefill of their prompt, so that the
    clock does not tell what others have asked with the same key; None sends them at once."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names under which clients may address the server."""

    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask the server, ``"*"`` for all."""

    log_format: Literal["text", "json"] = "text"
    """Whether the log has lines for people or for machines."""

    max_tenants: int = Field(default=64, ge=1)
    """Most tenants whose chunks and documents are open at once."""

    max_names: int = Field(default=1000, ge=1)
    """Most names below one key (``tenant``) that have documents of their own."""

    max_pinned_share: float = Field(default=0.5, ge=0, le=1)
    """Part of the store's ``disk_bytes`` that pinned documents may take, of each key an equal part."""

    chunk_chars: int = Field(default=1000, ge=100)
    """Longest chunk of a document, in characters."""

    max_document_pages: int = Field(default=2000, ge=1)
    """Most pages of an uploaded PDF."""

    max_document_chars: int = Field(default=5_000_000, ge=1)
    """Most characters of text of an uploaded document."""

    reading_bytes: int = Field(default=2**30, ge=2**28)
    """Memory of the process that reads an upload."""

    reading_timeout_s: int = Field(default=60, ge=1)
    """Seconds that this process may compute; it is waited for three times as long."""

    max_waiting_jobs: int = Field(default=1000, ge=1)
    """Most uploads of one tenant that wait to be ingested; tenants take turns."""

    request_log: Literal["auto", "off", "counts", "texts"] = "auto"
    """What is kept of requests, beside the store: nothing, numbers, or also what was asked and answered. ``"auto"``
    keeps texts where there are no keys, so that only this machine reaches the server, and numbers otherwise."""

    request_log_days: float = Field(default=30.0, gt=0)
    """Days for which requests are kept."""

    request_log_bytes: int = Field(default=2**28, ge=2**20)
    """Bytes of requests that are kept; of those that are too many the oldest go, of each tenant alike."""

    sweep_s: float = Field(default=30.0, gt=0)
    """Seconds from one search for documents and requests that have expired to the next."""

    questions: tuple[str, ...] = ()
    """Questions that the web UI offers to begin with."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ConfigError(f"The server's options cannot work: {wrong}") from error
        if not self.is_local and not self.api_keys:
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, so keys are needed: give api_keys, or listen "
                "on 127.0.0.1."
            )
        unknown = self.quotas.keys() - (self.api_keys or {"default"})
        if unknown:
            raise ConfigError(f"There are quotas for {', '.join(sorted(unknown))}, but no keys of these tenants.")
        short = [tenant for tenant, key in self.api_keys.items() if len(key.get_secret_value()) < 16]
        if short:
            raise ConfigError(f"The keys of {', '.join(short)} are shorter than 16 characters and can be guessed.")

    @property
    def keeps_of_requests(self) -> Literal["off", "counts", "texts"]:
        """What is kept of requests."""
        if self.request_log == "auto":
            return "counts" if self.api_keys else "texts"
        return self.request_log

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False
