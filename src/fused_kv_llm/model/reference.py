"""A model's reference KV: what it computes for a fixed text, to be compared with what it computed earlier.

A fingerprint says that weights, configuration and code are the same as far as they can be hashed. What a hook reads
from elsewhere, what a patched library function does, or another release of a library, only the numbers can tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model.cache import FusedCache
from fused_kv_llm.model.cache_pool import CachePool
from fused_kv_llm.model.deviation import Deviation, by_layer, worst
from fused_kv_llm.model.forward import forward_rows
from fused_kv_llm.model.forward_pass import ForwardPass
from fused_kv_llm.model.loading import LoadedModel

__all__ = ["compare_reference", "compute_reference", "measure_noise"]

_TEXT = "The ferry leaves the harbour at seven in the morning, and returns at noon with the post and twelve passengers."
_TOKENS = 8
_LOGITS = 4096
_NOISE = "noise"
# Between two processors rounding was never more than between two lengths of a forward on one.
_MARGIN = 4.0


def compute_reference(loaded: LoadedModel) -> dict[str, Tensor]:
    """Compute a model's reference.

    Parameters
    ----------
    loaded : LoadedModel

    Returns
    -------
    dict of str to Tensor
        ``"<number>.keys"`` and ``"<number>.values"`` ``[Hkv, n, D]`` of every layer, and ``"logits"`` ``[1, 1, V]``
        of the last token, a few thousand of them.
    """
    return _compute(loaded, _TOKENS)


def measure_noise(loaded: LoadedModel, reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a reference together with how much rounding changes it: that of a forward of another length."""
    longer = _compute(loaded, 3 * _TOKENS)
    names = sorted(set(reference) - {"logits"})
    deviations = by_layer((longer[name][:, : reference[name].shape[1]], reference[name]) for name in names)
    return {**reference, _NOISE: torch.tensor(deviations)}


def compare_reference(stored: Mapping[str, Tensor], now: Mapping[str, Tensor], dtype: torch.dtype) -> Deviation | None:
    """Compare a stored reference with what a model computes now.

    Parameters
    ----------
    stored : mapping of str to Tensor
        From :func:`measure_noise`.
    now : mapping of str to Tensor
        From :func:`compute_reference`.
    dtype : torch.dtype
        What the model computes in.

    Returns
    -------
    Deviation or None
        None if they differ by no more than rounding. The layer behind the last one stands for the logits.
    """
    names = sorted(set(now) - {"logits"})
    if {name: tensor.shape for name, tensor in now.items()} != {
        name: tensor.shape for name, tensor in stored.items() if name != _NOISE
    }:
        return Deviation(0, torch.inf, 0.0)
    layers = [int(name.partition(".")[0]) for name in names]
    noise = [float(one) for one in stored[_NOISE]] if _NOISE in stored else [0.0] * len(names)
    pairs = [(now[name], stored[name]) for name in (*names, "logits")]
    margins = [_MARGIN * one for one in (*noise, max(noise))]
    return worst(by_layer(pairs), dtype, layers=[*layers, max(layers) + 1], floors=margins)


def _compute(loaded: LoadedModel, tokens: int) -> dict[str, Tensor]:
    ids = loaded.tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    # A tokenizer that knows none of the words still gives some token.
    ids = torch.tensor([(ids * tokens)[:tokens]], device=loaded.device)
    rows = torch.arange(tokens, device=loaded.device)
    known = loaded.model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= known:
        raise ConfigError(
            f"The tokenizer of {loaded.model_id!r} gives the token id {int(ids.max())}, but the model has {known} "
            "embeddings: pass the tokenizer that the model was trained with."
        )
    cache = FusedCache(loaded.geometry, tokens, CachePool(loaded.dtype, loaded.device))
    with torch.inference_mode():
        last_layer = loaded.geometry.last_layer
        logits = forward_rows(loaded, ids, rows, cache, ForwardPass(rows, tokens, final_layer=last_layer))
        found = {}
        for number, layer in enumerate(cache.layers):
            for name, part in (("keys", layer.keys), ("values", layer.values)):
                found[f"{number}.{name}"] = part[0, :, :tokens].to("cpu", copy=True)
    cache.release()
    last = logits[-1].cpu()
    return {**found, "logits": last[:: max(1, last.shape[0] // _LOGITS)][None, None].clone()}
