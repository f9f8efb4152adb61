"""The options of an application of several replicas."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.server import ServerConfig

from .placement import PlacementOptions

__all__ = ["ServingOptions", "gateway_config", "replica_server", "server_config"]

_FROM_VARIABLE = "env:"
# Stands for a key that only the nodes know which serve.
_UNKNOWN_KEY = "a-key-that-is-not-known-here"


class ServingOptions(BaseModel):
    """The options of an application of several replicas, checked.

    Raises
    ------
    ConfigError
        If a value cannot work.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    engine: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, the same in every replica. With ``remote``, set ``refresh_s`` as well."""

    server: dict[str, Any] = Field(default_factory=dict)
    """Options of the server: keys, quotas, names. A key ``"env:NAME"`` is read from that environment variable where
    requests are served. Tenants' requests are counted by gateways and their tokens by replicas, each with an equal
    share of a quota; with ``max_replicas``, as if there were so many. Where the server listens is Ray Serve's business,
    but its ``host`` decides whether keys are required."""

    replicas: int = Field(default=1, ge=1)
    """Replicas to begin with, and with ``max_replicas=None`` for good."""

    max_replicas: int | None = Field(default=None, ge=1)
    """Most replicas; more than ``replicas`` has Ray Serve add some while requests wait, and take them away again."""

    target_requests: float = Field(default=8.0, gt=0)
    """Requests of a replica that scaling aims at."""

    upscale_delay_s: float = Field(default=30.0, ge=0)
    """Seconds for which there must be more requests before replicas are added."""

    downscale_delay_s: float = Field(default=600.0, ge=0)
    """Seconds for which there must be fewer before replicas are taken away, with what they hold in memory."""

    requests_at_once: int = Field(default=32, ge=1)
    """Most requests of a replica at once; others wait at the gateway, or go to another replica."""

    max_waiting: int = Field(default=256, ge=1)
    """Most requests that wait at a gateway; further ones are refused with status 429. As many may wait for the gateway
    itself at each of Ray Serve's proxies, where further ones are refused with 503."""

    replica_cpus: float = Field(default=1.0, ge=0)
    """Cores that Ray sets aside for a replica; PyTorch takes as many threads, at least one."""

    replica_gpus: float = Field(default=0.0, ge=0)
    """Devices that Ray sets aside for a replica."""

    gateways: int = Field(default=1, ge=1)
    """Processes that clients' requests come through. They have no model."""

    gateway_cpus: float = Field(default=0.1, ge=0)
    """Cores that Ray sets aside for one."""

    routing: Literal["chunks", "random"] = "chunks"
    """Whether requests go where their chunks and conversations are, or anywhere."""

    placement: PlacementOptions = Field(default_factory=PlacementOptions)
    """How residence and load are weighed."""

    stats_period_s: float = Field(default=1.0, gt=0)
    """Seconds from one publication of what a replica holds to the next."""

    catalog_period_s: float = Field(default=5.0, gt=0)
    """Seconds from one look for newly stored chunks to the next."""

    attempts: int = Field(default=4, ge=1)
    """Replicas that a request is sent to at most, one after another, if they die before its answer begins."""

    health_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a replica has to say that it is well; one that does not three times is replaced."""

    drain_s: float = Field(default=120.0, ge=0)
    """Seconds that a replica which is to be stopped has for the answers it has begun; a gateway has ten more."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ConfigError(f"The options of the application cannot work: {wrong}") from error

    @model_validator(mode="after")
    def _scales_up(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}")
        return self


def server_config(given: Mapping[str, Any], *, anywhere: bool = False) -> ServerConfig:
    """Return a server's options with its keys, of which some may be in environment variables.

    Parameters
    ----------
    given : mapping
        As ``ServingOptions.server`` has them.
    anywhere : bool
        Whether variables may be missing, since nothing is served here.

    Raises
    ------
    ConfigError
        If a value cannot work, or a variable is not set.
    """
    keys = given.get("api_keys")
    if not isinstance(keys, Mapping):
        return ServerConfig(**given)
    return ServerConfig(**{**given, "api_keys": {name: _key(key, anywhere=anywhere) for name, key in keys.items()}})


def gateway_config(options: ServingOptions) -> ServerConfig:
    """Return the server's options of one gateway, where tenants' requests are counted: its share of them.

    Raises
    ------
    ConfigError
        If a value cannot work, or a variable is not set.
    """
    quotas = server_config(options.server).quotas
    requests = {tenant: _share(quota.requests_per_minute, options.gateways) for tenant, quota in quotas.items()}
    shares = {tenant: {"requests_per_minute": share} for tenant, share in requests.items()}
    return server_config({**options.server, "quotas": shares})


def replica_server(options: ServingOptions) -> dict[str, Any]:
    """Return the server's options of one replica, where tenants' tokens are counted: its share of them.

    Raises
    ------
    ConfigError
        If a value cannot work.
    """
    most, quotas = options.max_replicas or options.replicas, server_config(options.server, anywhere=True).quotas
    shares = {tenant: {"tokens_per_minute": _share(quota.tokens_per_minute, most)} for tenant, quota in quotas.items()}
    return {**options.server, "quotas": shares} if shares else options.server


def _share(bound: int | None, count: int) -> int | None:
    return None if bound is None else math.ceil(bound / count)


def _key(key: Any, *, anywhere: bool) -> Any:
    if not isinstance(key, str) or not key.startswith(_FROM_VARIABLE):
        return key
    variable = key.removeprefix(_FROM_VARIABLE)
    found = os.environ.get(variable, _UNKNOWN_KEY if anywhere else None)
    if found is None:
        raise ConfigError(
            f"api_keys: the environment variable {variable} is not set: set it where requests are served."
        )
    return found
