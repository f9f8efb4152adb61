"""Options of several replicas, and the example files that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.scale.options import ServingOptions, gateway_config, replica_server, server_config

EXAMPLES = Path(__file__).parents[2] / "examples"
KUBERNETES = yaml.safe_load((EXAMPLES / "kubernetes" / "rayservice.yaml").read_text(encoding="utf-8"))
SERVE = yaml.safe_load((EXAMPLES / "server" / "ray_serve.yaml").read_text(encoding="utf-8"))


def test_every_option_says_what_it_is() -> None:
    assert all(field.description for field in ServingOptions.model_fields.values())


@pytest.mark.parametrize(
    ("given", "wrong"),
    [({"replicas": 2, "max_replicas": 1}, "max_replicas=1"), ({"replica": 2}, "replica"), ({"routing": "x"}, "routing"),
     ({"placement": {"imbalance": -1}}, "imbalance=-1")],
)  # fmt: skip
def test_what_cannot_work_is_refused(given: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        ServingOptions(**given)


def test_keys_come_from_variables_where_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"api_keys": {"sales": "env:SALES_KEY", "other": "0123456789abcdef"}}
    with pytest.raises(ConfigError, match="SALES_KEY is not set"):
        server_config(given)
    assert set(server_config(given, anywhere=True).api_keys) == {"sales", "other"}
    monkeypatch.setenv("SALES_KEY", "fedcba9876543210")
    found = {name: key.get_secret_value() for name, key in server_config(given).api_keys.items()}
    assert found == {"sales": "fedcba9876543210", "other": "0123456789abcdef"}


def test_a_quota_is_shared_by_those_that_count() -> None:
    quotas = {"default": {"requests_per_minute": 9, "tokens_per_minute": 1000}}
    options = ServingOptions(server={"quotas": quotas}, gateways=2, replicas=2, max_replicas=4)
    (here,) = gateway_config(options).quotas.values()
    assert (here.requests_per_minute, here.tokens_per_minute) == (5, None)
    (there,) = server_config(replica_server(options)).quotas.values()
    assert (there.requests_per_minute, there.tokens_per_minute) == (None, 250)
    assert replica_server(ServingOptions(server={"host": "::1"})) == {"host": "::1"}


def applications() -> list[Any]:
    return [SERVE["applications"][0], yaml.safe_load(KUBERNETES["spec"]["serveConfigV2"])["applications"][0]]


@pytest.mark.parametrize("application", applications(), ids=["serve", "kubernetes"])
def test_the_examples_have_options_that_there_are(application: dict[str, Any]) -> None:
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("fused_kv_llm.scale", "build_app")
    options = ServingOptions(**application["args"])
    server_config(options.server, anywhere=True)
    engine = EngineConfig(**options.engine)
    assert engine.remote is None or engine.refresh_s == 60


@pytest.mark.parametrize("application", applications(), ids=["serve", "kubernetes"])
def test_ray_takes_the_examples(application: dict[str, Any]) -> None:
    pytest.importorskip("ray")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve.schema import ServeDeploySchema

        whole = {"applications": [application]} | {key: SERVE[key] for key in ("proxy_location", "http_options")}
        (found,) = ServeDeploySchema.model_validate(whole).applications
    assert found.name == "fused-kv"


def test_the_cluster_has_what_its_replicas_take() -> None:
    spec = KUBERNETES["spec"]["rayClusterConfig"]
    (workers,) = spec["workerGroupSpecs"]
    options = ServingOptions(**applications()[1]["args"])
    assert (KUBERNETES["apiVersion"], KUBERNETES["kind"]) == ("ray.io/v1", "RayService")
    assert workers["minReplicas"] == options.replicas
    assert workers["maxReplicas"] == options.max_replicas
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    limits, volumes = container["resources"]["limits"], {one["name"] for one in pod["volumes"]}
    assert float(limits["cpu"]) >= options.replica_cpus + options.gateways * options.gateway_cpus
    assert float(limits["nvidia.com/gpu"]) == options.replica_gpus
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    # A gateway has ten seconds more than a replica.
    assert pod["terminationGracePeriodSeconds"] > options.drain_s + 10
    # A pod's memory holds the tier, the model beside it, and its folder's volume the store.
    assert EngineConfig(**options.engine).memory_bytes < 96 * 2**30
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == container["image"]
    assert {"name": "serve", "containerPort": 8000} in head["ports"]
