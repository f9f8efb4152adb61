"""The application for Ray Serve, as it is built: no cluster is started."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest

from fused_kv_llm.errors import ConfigError, FusedKVWarning, MissingExtraError
from fused_kv_llm.scale import build_app

pytest.importorskip("ray")
# Ray's own warnings, when it is imported, are no concern of these tests.
pytestmark = pytest.mark.filterwarnings("ignore")


def deployments(**args: Any) -> tuple[Any, Any]:
    """Return the gateway's and the replica's deployment, with the numbers that Ray Serve is told."""
    gateway = build_app(args)._bound_deployment
    return gateway, gateway.init_args[0]._bound_deployment


def test_a_gateway_outlives_the_replicas_whose_answers_it_passes_on() -> None:
    gateway, replica = deployments(drain_s=90)
    assert replica._deployment_config.graceful_shutdown_timeout_s == 90
    assert gateway._deployment_config.graceful_shutdown_timeout_s == 100


@pytest.mark.parametrize("replicas", [{}, {"replicas": 3}, {"replicas": 2, "max_replicas": 5}])
def test_a_gateway_has_room_for_requests_that_find_the_queue_full(replicas: dict[str, int]) -> None:
    gateway, replica = (one._deployment_config for one in deployments(requests_at_once=4, max_waiting=6, **replicas))
    held = replica.max_ongoing_requests * replicas.get("max_replicas", replicas.get("replicas", 1))
    assert replica.max_queued_requests == 6
    # Those that come above are refused by the queue of the gateway; what waits before it is bounded, too.
    assert gateway.max_ongoing_requests == held + replica.max_queued_requests + 6
    assert gateway.max_queued_requests == 6


def test_wrong_options_of_the_engine_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="recompute_ratio"):
        build_app({"engine": {"recompute_ratio": 7}})
    with pytest.raises(ConfigError, match="no_such_option"):
        build_app({"engine": {"no_such_option": 1}})


@pytest.mark.parametrize("missing", ["ray.serve", "ray"])
def test_ray_without_its_serve_extra_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"ray\[serve\].*fused-kv-llm\[ray\]"):
        build_app({})


def test_a_remote_tier_that_is_never_looked_at_again_is_warned_of() -> None:
    engine = {"remote": "file:///mnt/share"}
    with pytest.warns(FusedKVWarning, match="refresh_s=60"):
        build_app({"engine": engine})
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedKVWarning)
        build_app({"engine": {**engine, "refresh_s": 60}})
