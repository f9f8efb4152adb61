"""A KV connector for vLLM: exact prefixes of prompts from and to a store, across processes and restarts.

vLLM loads it by name::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FusedKVConnector",
        "kv_connector_module_path": "fused_kv_vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_dir": "/var/lib/kv"}}'

``hand_over`` has an engine fuse a prompt for it. The connector is imported when it is asked for, so that the package is
of use where vLLM is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fused_kv_llm.errors import MissingExtraError
from fused_kv_vllm.handed import HandedPrompt, hand_over

if TYPE_CHECKING:
    from fused_kv_vllm.connector import FusedKVConnector

__all__ = ["FusedKVConnector", "HandedPrompt", "hand_over"]


def __getattr__(name: str) -> Any:
    if name != "FusedKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", reason="fused_kv_vllm.FusedKVConnector is a part of a vLLM server") from error
    from fused_kv_vllm.connector import FusedKVConnector

    return FusedKVConnector
