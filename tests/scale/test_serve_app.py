"""The application for Ray Serve, as it is built: no cluster is started."""

from __future__ import annotations

from typing import Any

import pytest

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
