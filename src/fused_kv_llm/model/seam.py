"""Running a model's own forward under a pass: what :mod:`.forward` and the checks at loading share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.pass_context import LayerPass, StopForwardError, running

__all__ = ["decoder_layers", "run_decoder", "run_model"]

_LAYERS = ("layers", "h", "blocks")


def decoder_layers(model: Any) -> Sequence[Any]:
    """Return a model's layers.

    Raises
    ------
    UnsupportedModelError
        If they are not where decoders have them.
    """
    decoder = model.get_decoder()
    for name in _LAYERS:
        layers = getattr(decoder, name, None)
        if isinstance(layers, torch.nn.ModuleList):
            return list(layers)
    raise UnsupportedModelError(
        f"{type(model).__name__} is not supported: it is no decoder with a list of layers ({type(decoder).__name__})."
    )


def _inputs(ids: Tensor, positions: Tensor, cache: Cache) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "position_ids": positions.expand(ids.shape[0], -1),
        "past_key_values": cache,
        "use_cache": True,
        "attention_mask": None,
    }


def run_decoder(model: Any, ids: Tensor, positions: Tensor, cache: Cache, forward_pass: LayerPass) -> None:
    """Run a model's decoder, without its output head, until the pass ends it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    ids : Tensor
        int64 ``[B, R]``.
    positions : Tensor
        int64 ``[R]``, or ``[B, R]``: what the rows' rotation is of.
    cache : Cache
        Receives the keys and values.
    forward_pass : ForwardPass

    Raises
    ------
    UnsupportedModelError
        If a layer does not attend through the seam.
    """
    with running(forward_pass):
        try:
            model.get_decoder()(**_inputs(ids, positions, cache))
        except StopForwardError:
            return
    forward_pass.check_complete(_num_layers(model))


def run_model(model: Any, ids: Tensor, positions: Tensor, cache: Cache, forward_pass: LayerPass) -> Tensor:
    """Run a model and return logits, ``[B, R, vocabulary]``, or those of the pass's final rows.

    Parameters and errors are those of :func:`run_decoder`.
    """
    final = forward_pass.final_rows
    takes = final is not None and _takes_logits_to_keep(type(model).forward)
    options: dict[str, Any] = {"logits_to_keep": 1 if isinstance(final, slice) else final} if takes else {}
    forward_pass.head = model.get_output_embeddings()
    with running(forward_pass):
        logits: Tensor = model(**_inputs(ids, positions, cache), **options).logits
    forward_pass.check_complete(_num_layers(model))
    return logits if final is None or takes else logits[:, final]


def _num_layers(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


@lru_cache(maxsize=64)
def _takes_logits_to_keep(forward: Callable[..., Any]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters
