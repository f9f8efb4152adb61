"""PEFT adapters: which of them take part in a forward, and which kinds can be fused.

An adapter may be loaded, active, switched off or merged, in every layer by itself. Only what takes part in a forward
counts: a model whose adapters are all off computes what its base computes, and so has the base's identity; adapters
that wait beside the active one do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fused_kv_llm.errors import ConfigError, UnsupportedModelError

__all__ = ["ADAPTER_KINDS", "ForwardNames", "adapter_layers", "adapter_settings", "check_adapters", "in_effect"]

ADAPTER_KINDS = (
    "adalora", "adamss", "beft", "boft", "c3a", "deft", "delora", "fourierft", "glora", "gralora", "hira",
    "hra", "ia3", "ln_tuning", "loha", "lokr", "lora", "miss", "oft", "osf", "peanut", "pvera", "randlora",
    "road", "supertuning", "tinylora", "trainable_tokens", "unilora", "vblora", "vera", "waveft",
)  # fmt: skip
"""Kinds that were tested: each changes linear layers, norms or embeddings, token by token."""

_BASES = ("base_layer", "original_module")


def adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and modules of the layers that hold adapters."""
    for name, module in model.named_modules():
        if hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "merged_adapters"):
            yield name, module


def in_effect(layer: Any) -> list[str]:
    """Return the adapters that take part in a layer's forward; merged ones are a part of its weights."""
    if layer.disable_adapters or layer.merged_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer._get_available_adapters()]


def check_adapters(model: Any, model_id: str) -> None:
    """Refuse adapters whose KV cannot be moved, or of kinds that were not tested.

    Parameters
    ----------
    model : torch.nn.Module
        As the user gave it, perhaps wrapped by PEFT.
    model_id : str
        Its name, for messages.

    Raises
    ------
    UnsupportedModelError
    ConfigError
        If adapters are merged and switched off at once: the next forward would take them out of the weights.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"The adapter of {model_id!r} is of type {_type_of(config)}: it puts learnt tokens or keys before "
                "every prompt, of which stored KV would know nothing. Use an adapter of another type, such as LoRA, or "
                "model.unload() for the base model alone."
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"The adapter of {model_id!r} is an activated LoRA, which begins at certain tokens of a prompt: "
                "stored KV would be wrong on one side of them. Use a plain LoRA."
            )
        if _type_of(config).lower() not in ADAPTER_KINDS:
            raise _untested(model_id, _type_of(config))
    for name, layer in adapter_layers(model):
        kind = type(layer).__module__.removeprefix("peft.").split(".")
        if kind[0] == "tuners" and kind[1] not in ADAPTER_KINDS:
            raise _untested(model_id, kind[1])
        if layer.disable_adapters and layer.merged_adapters:
            raise ConfigError(
                f"Adapters of {model_id!r} are merged into {name!r} and switched off: the next forward would take them "
                "out of the weights again. Call model.unmerge_adapter() first, or switch them on."
            )


def _type_of(config: Any) -> str:
    kind = config.peft_type
    return str(getattr(kind, "value", kind))


def _untested(model_id: str, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The adapter of {model_id!r} is of type {kind.upper()}, which was not tested. Use one of "
        f"{', '.join(kind.upper() for kind in ADAPTER_KINDS)}, or merge it: model.merge_and_unload()."
    )


def adapter_settings(layer: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return what a layer's forward does with each adapter in effect: scaling, DoRA, bias, ...

    Returns
    -------
    list of (str, dict)
        Name, and its settings that are set. Adapters are applied in this order.
    """
    found = []
    for adapter in in_effect(layer):
        settings: dict[str, Any] = {}
        for name, value in vars(layer).items():
            kept = value.get(adapter) if isinstance(value, dict) and not name.startswith("_") else None
            if isinstance(kept, (bool, int, float, str)) and kept:
                settings[name] = kept
            elif kept is not None and not isinstance(kept, (bool, int, float, str)):
                settings[name] = type(kept).__qualname__
        settings["fan_in_fan_out"] = bool(getattr(layer, "fan_in_fan_out", False))
        found.append((adapter, settings))
    return found


class ForwardNames:
    """Names of modules and tensors as they would be without the adapters that are not in effect.

    Parameters
    ----------
    model : torch.nn.Module
    """

    def __init__(self, model: Any) -> None:
        self._hidden: set[str] = set()
        self._bases: set[str] = set()
        for name, layer in adapter_layers(model):
            active = in_effect(layer)
            for child, module in layer.named_children():
                if not active and child in _BASES:
                    self._bases.add(f"{name}.{child}")
                elif not active and child != "token_adapter":
                    self._hidden.add(f"{name}.{child}")
                elif hasattr(module, "keys"):
                    self._hidden |= {f"{name}.{child}.{key}" for key in module.keys() - set(active)}

    def __call__(self, name: str) -> str | None:
        """Return the name of what takes part in a forward; None for what does not."""
        shown: list[str] = []
        path = ""
        for part in name.split("."):
            path = f"{path}.{part}" if path else part
            if path in self._hidden:
                return None
            if path not in self._bases:
                shown.append(part)
        return ".".join(shown)
