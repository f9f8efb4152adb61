"""The Ray Serve application: gateways in front of replicas of the engine. Ray is imported when it is built."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Any

from starlette.types import ASGIApp

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.errors import FusedKVWarning, MissingExtraError, QueueFullError

from .forwarding import Call
from .gateway import Answering, gateway_app
from .options import ServingOptions, gateway_config, replica_server, server_config
from .placement import RoutingKey
from .replica import EngineReplica
from .routing_keys import RoutingKeys

__all__ = ["Gateway", "build_app", "check_ray", "run_app"]

_log = logging.getLogger(__name__)

# A gateway outlives the replicas whose answers it passes on.
_GATEWAY_DRAINS_LONGER_S = 10.0
_ROUTERS = {"chunks": "fused_kv_llm.scale.router:ChunkRouter", "random": "fused_kv_llm.scale.router:RandomRouter"}


class Gateway:
    """What clients reach; Ray Serve runs it as the application's ingress.

    Parameters
    ----------
    replicas : ray.serve.handle.DeploymentHandle
    options : ServingOptions
    """

    def __init__(self, replicas: Any, options: ServingOptions) -> None:
        self._options = options
        self._replicas = replicas
        self._answers = replicas.options(method_name="answer", stream=True)
        self._keys = RoutingKeys()
        self._told: dict[str, dict[str, int]] = {}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application, as Ray Serve asks for it."""
        from ray.exceptions import ObjectLostError, RayActorError

        config = gateway_config(self._options)
        lost = (RayActorError, ObjectLostError)
        return gateway_app(self._ask, self._keys, config, lost, self._options.attempts, self._learn)

    def _ask(self, call: Call, key: RoutingKey) -> Answering:
        return _Answer(self._answers.remote(call, key))

    async def _learn(self) -> None:
        """Learn of stored chunks again and again."""
        while True:
            try:
                while await self._learn_more():
                    pass
            except Exception as error:  # the next attempt may work; until then unknown chunks are routed by load
                _log.warning("Stored chunks could not be asked for", exc_info=error)
            await asyncio.sleep(self._options.catalog_period_s)

    async def _learn_more(self) -> bool:
        """Ask every replica; return whether one has more to tell."""
        told = await self._replicas.broadcast("stored", self._told).results_async(return_exceptions=True)
        more, answers = False, [one for one in told if not isinstance(one, BaseException)]
        for name, after, hashes in answers:
            self._keys.add(hashes)
            self._told[name] = after
            more = more or len(hashes[0]) > 0
        # Of replicas that are gone nothing has to be remembered.
        self._told = {name: self._told[name] for name, _, _ in answers}
        return more


class _DeployedReplica(EngineReplica):
    async def __del__(self) -> None:
        # Ray Serve awaits it when a replica is stopped.
        await self.close()


class _Answer:
    """A response under way, with Ray's own errors of a full queue as the library's."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def cancel(self) -> None:
        self._response.cancel()

    async def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        from ray.serve.exceptions import BackPressureError

        try:
            async for message in self._response:
                yield message
        except BackPressureError as error:
            raise QueueFullError("Too many requests wait for a replica; ask again later.") from error


def build_app(args: Mapping[str, Any]) -> Any:
    """Return the application for ``ray.serve.run``, or as ``import_path: fused_kv_llm.scale:build_app``.

    Parameters
    ----------
    args : mapping
        Options of :class:`.options.ServingOptions`.

    Returns
    -------
    ray.serve.Application

    Raises
    ------
    ConfigError
        If an option cannot work.
    MissingExtraError
        If Ray Serve is not installed.
    """
    check_ray()
    from ray import serve

    options = ServingOptions(**args)
    # Wrong options are refused here, and not by every replica again and again.
    server_config(options.server, anywhere=True)
    engine = EngineConfig(**options.engine)
    if engine.remote is not None and engine.refresh_s is None:
        warnings.warn(
            "The replicas have a remote tier and no refresh_s: they learn of chunks that others store or delete only "
            "when they start. Set refresh_s in the options of the engine, such as refresh_s=60.",
            FusedKVWarning,
            stacklevel=2,
        )
    replica: Any = serve.deployment(
        _DeployedReplica,
        name="replica",
        ray_actor_options={"num_cpus": options.replica_cpus, "num_gpus": options.replica_gpus},
        max_ongoing_requests=options.requests_at_once,
        max_queued_requests=options.max_waiting,
        graceful_shutdown_timeout_s=options.drain_s,
        health_check_timeout_s=options.health_timeout_s,
        request_router_config=_router_config(options),
        **_scaling(options),
    )
    gateway: Any = serve.deployment(
        serve.ingress()(Gateway),
        name="gateway",
        num_replicas=options.gateways,
        ray_actor_options={"num_cpus": options.gateway_cpus},
        graceful_shutdown_timeout_s=options.drain_s + _GATEWAY_DRAINS_LONGER_S,
        # Beyond what replicas work on and what waits for them, as many again: those are the ones that are refused with
        # 429. At exactly the sum, further requests would wait before the gateway and never reach that.
        max_ongoing_requests=2 * options.max_waiting
        + options.requests_at_once * (options.max_replicas or options.replicas),
        max_queued_requests=options.max_waiting,
    )
    return gateway.bind(replica.bind(options.engine, replica_server(options)), options)


def run_app(options: Mapping[str, Any], host: str, port: int) -> None:
    """Serve until the process is told to end (Ctrl-C), on the Ray cluster that there is, or on one of its own.

    Parameters
    ----------
    options : mapping
        As :func:`build_app` takes them.
    host, port : str and int
        Where Ray Serve listens.

    Raises
    ------
    ConfigError
        If an option cannot work.
    MissingExtraError
        If Ray Serve is not installed.
    """
    app = build_app(options)
    from ray import serve

    serve.start(http_options={"host": host, "port": port})
    serve.run(app, name="fused-kv", blocking=True)


def check_ray() -> None:
    """Make sure that Ray Serve is installed.

    Raises
    ------
    MissingExtraError
        If it is not.
    """
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        # Ray is there without what its own extra brings, or is not there.
        raise MissingExtraError("ray[serve]", "ray", "Several replicas need it") from error


def _router_config(options: ServingOptions) -> Any:
    from ray.serve.config import RequestRouterConfig

    values: dict[str, Any] = {
        "request_router_class": _ROUTERS[options.routing],
        "request_router_kwargs": asdict(options.placement),
        "request_routing_stats_period_s": options.stats_period_s,
    }
    return RequestRouterConfig(**values)


def _scaling(options: ServingOptions) -> dict[str, Any]:
    if options.max_replicas is None or options.max_replicas == options.replicas:
        return {"num_replicas": options.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests,
            "upscale_delay_s": options.upscale_delay_s,
            "downscale_delay_s": options.downscale_delay_s,
        }
    }
