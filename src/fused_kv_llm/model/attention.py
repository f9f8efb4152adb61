"""The attention seam: an attention function and a mask function, registered under one name.

Attention asks the pass that is being run (:mod:`.pass_context`). The mask function hands the model's own mask on as a
function of positions (:mod:`.mask`), which reaches attention in place of a matrix. A forward outside of a pass, for
instance a user's own ``model.generate``, takes the implementation that the model had before: SDPA, or its eager code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from fused_kv_llm.errors import ConfigError, UnsupportedModelError
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.mask import CAUSAL, MaskRule
from fused_kv_llm.model.pass_context import current_pass

__all__ = ["ATTENTION_NAME", "attach_attention", "check_attached", "rule_of"]

ATTENTION_NAME = "fused_kv"
_OVER_EAGER = "fused_kv_over_eager"
# What these say is known already: the mask comes from the model, and rotation was done before.
_IGNORED = {"sliding_window", "position_ids", "cache_position", "use_cache", "is_first_iteration", "logits_to_keep"}
# Under which name each model was attached: over SDPA, or over its own eager code.
_attached: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_ELSEWHERE = (
    "A layer of the model asks attention for {what}, which the engine does not compute. Nothing was reused: this model "
    "cannot be fused."
)


def rule_of(module: Any, mask: Any, scaling: float | None, width: int, **options: Any) -> AttentionRule:
    """Return how a layer attends, from the arguments that transformers gives an attention function.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module.
    mask : MaskRule
        What the mask function returned for this layer.
    scaling : float or None
        Multiplies the scores; None is one over the root of `width`.
    width : int
        Of a query.
    **options
        The other keyword arguments of the attention function.

    Raises
    ------
    UnsupportedModelError
        If an argument is not None and would be left out, or the layer is not causal.
    """
    softcap, sinks = options.pop("softcap", None), options.pop("s_aux", None)
    if options.pop("dropout", 0.0):
        raise UnsupportedModelError(_ELSEWHERE.format(what="dropout: call model.eval() first"))
    if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(_ELSEWHERE.format(what="attention that is not causal (is_causal=False)"))
    for name, value in options.items():
        if name not in _IGNORED and value is not None and value is not False:
            raise UnsupportedModelError(_ELSEWHERE.format(what=f"{name}={type(value).__name__}"))
    if not isinstance(mask, MaskRule):
        raise UnsupportedModelError(_ELSEWHERE.format(what=f"a mask of its own ({type(mask).__name__})"))
    return AttentionRule(float(width**-0.5 if scaling is None else scaling), mask, softcap, sinks)


def _fused(original: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        forward_pass = current_pass()
        if forward_pass is None:
            output, weights = original(module, query, key, value, attention_mask, scaling=scaling, **options)
            return output, weights
        rule = rule_of(module, attention_mask, scaling, query.shape[-1], **options)
        attended = forward_pass.run_attention(module.layer_idx, query, key, value, rule)
        return attended.transpose(1, 2).contiguous(), None

    return attend


def _eager(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the eager attention of the file that a module's class comes from."""
    for kind in type(module).__mro__:
        own = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if own is not None:
            return own(module, *args, **kwargs)
    raise UnsupportedModelError(f"{type(module).__name__} has no eager attention: load the model with another one.")


def _mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if current_pass() is None:
            return original(*args, **kwargs)
        function = kwargs["mask_function"]
        return CAUSAL if function is causal_mask_function else MaskRule(function)

    return make


def attach_attention(model: Any) -> None:
    """Let a model's attention go through the seam. Attaching it again changes nothing.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its attention implementation is set; nothing else about it changes.
    """
    implementation = model.config.get_text_config()._attn_implementation
    if implementation in (ATTENTION_NAME, _OVER_EAGER):
        _attached.setdefault(model, implementation)
        return
    for name, attention, mask in (
        (ATTENTION_NAME, sdpa_attention_forward, sdpa_mask),
        (_OVER_EAGER, _eager, eager_mask),
    ):
        AttentionInterface.register(name, _fused(attention))
        AttentionMaskInterface.register(name, _mask(mask))
    _attached[model] = _OVER_EAGER if implementation == "eager" else ATTENTION_NAME
    model.set_attn_implementation(_attached[model])


def check_attached(model: Any, model_id: str) -> None:
    """Make sure that a model's attention still goes through the seam, and is causal.

    Raises
    ------
    ConfigError
        If its implementation was changed.
    UnsupportedModelError
        If ``config.is_causal`` is false.
    """
    config, attached = model.config.get_text_config(), _attached.get(model, ATTENTION_NAME)
    if config._attn_implementation != attached:
        raise ConfigError(
            f"The attention of {model_id!r} was set to {config._attn_implementation!r} after it was loaded: fused "
            f"passes need {attached!r}. Set it back with model.set_attn_implementation({attached!r})."
        )
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(
            f"The model {model_id!r} has config.is_causal=False: its tokens see what comes after them, so no chunk has "
            "KV of its own. Set it to True, or use a causal model."
        )
