"""``FusedKVConnector``: what vLLM calls, in its scheduler and in its worker (KVConnector V1)."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import __version__
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from fused_kv_llm.errors import ConfigError, UnsupportedModelError
from fused_kv_vllm.blocks import BlockCaches, BlockLayout, WriteLayer
from fused_kv_vllm.handed import HANDED_MODEL_TYPES, handed_identity
from fused_kv_vllm.identity import PrefixIdentity, is_steady
from fused_kv_vllm.model_files import fingerprint_model_files, model_path
from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.scheduling import PrefixScheduler
from fused_kv_vllm.settings import ConnectorSettings
from fused_kv_vllm.transfers import Transfers
from fused_kv_vllm.worker import PrefixWorker

__all__ = ["FusedKVConnector"]

_log = init_logger("vllm.fused_kv")


@dataclass
class _Layout(KVConnectorHandshakeMetadata):
    """What the worker tells the scheduler."""

    layout: BlockLayout


@dataclass
class _Step(KVConnectorMetadata):
    """What the scheduler tells the worker."""

    transfers: Transfers


class FusedKVConnector(KVConnectorBase_V1):
    """Loads the longest stored prefix of a prompt, and stores the prompt's whole spans once they are computed.

    Its options are ``kv_connector_extra_config``, see ``ConnectorSettings``. Everything that it stores is exact: KV
    that vLLM computed from the first token on. What cannot be read is computed again.

    Raises
    ------
    ConfigError
        An option cannot work, vLLM runs on several devices, or ``kv_load_failure_policy`` is not ``"recompute"``.
    UnsupportedModelError
        The model keeps more than keys and values of all tokens.
    ModelNotFoundError
        The model's files cannot be found.
    StoreUnavailableError
        The store cannot be opened.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.of(transfer.kv_connector_extra_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._store = PrefixStore(self._settings.open_store())
        self._worker: PrefixWorker | None = None
        self._layout: BlockLayout | None = None
        self._told_not_written = 0
        self._scheduler = PrefixScheduler(
            self._store,
            self._block_tokens,
            self._settings.span_blocks(self._block_tokens),
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
            on_refused=_tell_refused,
        )
        # Both sides find out now whether there are files to tell the model by.
        self._model = _fingerprint(vllm_config) if role == KVConnectorRole.SCHEDULER else ""

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request that is preempted must not end before its KV is stored: it is a cache, so no."""
        return False

    # -- in the scheduler ------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take what the worker says of its caches: from here on prefixes are found."""
        (told,) = metadata.values()
        identity = _identity(self._vllm_config, self._model, told.layout)
        self._scheduler.identity = identity
        self._scheduler.handed_identity = _handed_identity(self._vllm_config, self._model)
        shared = identity.of_tenant(None)
        self._store.describe(shared.digest, f"vLLM {__version__}, {self._vllm_config.model_config.model}")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens can be loaded, and that they are loaded beside the steps."""
        count = self._scheduler.matched(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks into which a prefix is to be loaded."""
        if num_external_tokens > 0:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return what the worker is to do in this step."""
        return _Step(self._scheduler.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be used again at once."""
        self._scheduler.finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Stop using what is stored: vLLM asks for it when the weights in its memory have been replaced."""
        self._scheduler.forget_weights()
        return True

    # -- in the worker ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the caches, once they are there."""
        backend = _backend(self._vllm_config, list(kv_caches))
        caches = BlockCaches(kv_caches, self._block_tokens, backend, _layer_writer(self._vllm_config, kv_caches))
        self._layout = caches.layout
        self._worker = PrefixWorker(self._store, caches, self._settings.writes_waiting)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what the scheduler has to know of the caches."""
        return None if self._layout is None else _Layout(self._layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to read what the step asks for."""
        if self._worker is not None:
            self._worker.begin(self._transfers().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is computed once all of its layers are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are stored when the last one is computed."""

    def wait_for_save(self) -> None:
        """Copy what the step has completed, to be written beside the next ones."""
        if self._worker is not None:
            self._worker.save(self._transfers().saves)
            if self._worker.not_written > self._told_not_written:
                self._told_not_written = self._worker.not_written
                _log.warning("%d spans were not stored so far: the store is too slow.", self._told_not_written)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose prefixes are loaded."""
        if self._worker is None:
            return None, None
        return None, self._worker.finished(is_idle=self._transfers().is_idle) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        return set() if self._worker is None else self._worker.take_unread()

    def shutdown(self) -> None:
        """Write what waits to be written, and close the store."""
        if self._worker is not None:
            self._worker.close()
        self._store.close()

    def _transfers(self) -> Transfers:
        step = self._connector_metadata
        return step.transfers if isinstance(step, _Step) else Transfers()


def _check(config: Any, kv_cache_config: Any) -> None:
    policy = config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise ConfigError(
            f"kv_load_failure_policy={policy!r} fails a request when a stored file is damaged or gone. "
            'FusedKVConnector needs "kv_load_failure_policy": "recompute" in --kv-transfer-config.'
        )
    if config.parallel_config.world_size != 1:
        raise ConfigError(
            f"vLLM runs on {config.parallel_config.world_size} devices (tensor, pipeline or context parallel). "
            "FusedKVConnector stores what one device computes: start one server a device."
        )
    if config.model_config.runner_type != "generate":
        raise ConfigError(
            f"vLLM runs the model as {config.model_config.runner_type!r}: its tokens may look at later ones, so KV "
            "depends on more than a prefix. FusedKVConnector is for models that generate text."
        )
    if config.speculative_config is not None:
        raise ConfigError("FusedKVConnector does not store the KV of a draft model: leave out speculative decoding.")
    groups = kv_cache_config.kv_cache_groups
    kinds = {type(group.kv_cache_spec) for group in groups}
    if len(groups) != 1 or kinds != {FullAttentionSpec}:
        raise UnsupportedModelError(
            f"The model {config.model_config.model!r} keeps {len(groups)} kinds of caches "
            f"({', '.join(sorted(kind.__name__ for kind in kinds))}). FusedKVConnector stores keys and values of "
            "models whose layers all keep every token."
        )


def _fingerprint(config: Any) -> str:
    model, load_format = config.model_config, str(config.load_config.load_format)
    if load_format == "dummy":
        raise ConfigError("load_format='dummy' makes weights up: KV that is computed with them cannot be stored.")
    return fingerprint_model_files(model_path(model.model, model.revision))


def _identity(config: Any, fingerprint: str, layout: BlockLayout) -> PrefixIdentity:
    model = config.model_config
    computed_by = [__version__, str(model.quantization), str(model.model_impl), str(config.load_config.load_format)]
    return PrefixIdentity(
        model=fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        settings=model.hf_config.to_dict(),
        max_model_len=model.max_model_len,
        computed_by=", ".join(computed_by),
        layout=layout,
    )


def _backend(config: Any, layers: list[str]) -> str:
    """Return the name of the attention backend, and how it packs blocks where that depends on the processor."""
    found = get_layers_from_vllm_config(config, AttentionLayerBase, layers)
    names = {layer.get_attn_backend().get_name() for layer in found.values()}
    if len(names) != 1:
        raise UnsupportedModelError(f"The layers use {len(names)} attention backends: {', '.join(sorted(names))}.")
    (name,) = names
    if name == "CPU_ATTN":
        flags = (torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported(), torch.cpu._is_avx2_supported())
        return f"{name} {platform.machine()} {''.join('01'[flag] for flag in flags)}"
    return str(name)


def _layer_writer(config: Any, caches: Mapping[str, Tensor]) -> WriteLayer | None:
    """Return what writes keys and values as the backend packs them, if it can do that apart from attention."""
    layers = get_layers_from_vllm_config(config, AttentionLayerBase, list(caches))
    if not all(hasattr(layer.impl, "do_kv_cache_update") for layer in layers.values()):
        return None

    def write(name: str, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        layers[name].impl.do_kv_cache_update(layers[name], keys, values, caches[name], slots)

    return write


def _handed_identity(config: Any, fingerprint: str) -> str | None:
    """Return the identity of prompts that engines hand over; None if they may compute something else."""
    model = config.model_config
    is_plain = model.quantization is None and not model.hf_overrides and config.cache_config.cache_dtype == "auto"
    settings = model.hf_config.to_dict()
    if settings["model_type"] not in HANDED_MODEL_TYPES or not is_plain or not is_steady(settings):
        return None
    return handed_identity(fingerprint, str(model.dtype).removeprefix("torch.")).digest


def _tell_refused(reason: str) -> None:
    _log.warning("Requests with %s are computed by vLLM alone: their KV is neither stored nor loaded.", reason)
