"""Fast forwards of modules, and the check that a decoder layer may still take them.

A model belongs to its user, who may wrap, hook, exchange or convert any part of it at any time. A module's fast forward
therefore replaces its own only. A layer that computes its parts together, without calling them, first checks that none
of them was changed. This is asked for every layer in every pass, so the answer is kept with a snapshot of what it
depends on, and holds while the snapshot does.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.modules import module as _all_modules
from transformers.activations import ACT2FN

from fused_kv_kernels import LayerWeights, Norm
from fused_kv_llm.model.pass_context import current_pass

__all__ = ["FastForward", "has_known_gate", "is_ours", "is_plain", "own_parts"]

# What a snapshot of a part records, beside its own parts and parameters.
_WATCHED = ("forward", "_forward_hooks", "_forward_pre_hooks", "variance_epsilon")
_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))

_Linear = tuple[Tensor, Tensor | None]


class FastForward:
    """A module's forward: the fast one in a pass of the engine, the module's own otherwise.

    Parameters
    ----------
    module : torch.nn.Module
    way : callable
        The fast forward: takes the module and the arguments of its own forward.
    """

    def __init__(self, module: Any, way: Callable[..., Any]) -> None:
        self.module = module
        self.way = way
        self.kind = type(module)
        # A copy of the module, or one that was pickled, still knows what its class's forward was.
        self.of_class = self.kind.forward, self.kind.__call__
        # The decoder whose first layer this is, where all its layers are alike, and how it calls them.
        self.decoder: Any = None
        self.loop: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        module = self.module
        if current_pass() is not None and not torch.is_grad_enabled() and self.stands_for(type(module)):
            return self.way(module, *args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def stands_for(self, kind: type) -> bool:
        """Return whether a class is the one that this forward was made for, and nobody has patched its own."""
        forward, call = self.of_class
        return kind is self.kind and kind.forward is forward and kind.__call__ is call


def is_ours(module: Any, *own_hooks: Callable[..., Any]) -> bool:
    """Return whether a module's forward is the fast one of its class, and nobody has wrapped, hooked or patched it.

    Hooks before it that are among `own_hooks` are nobody's.
    """
    forward = vars(module).get("forward")
    same = type(forward) is FastForward and forward.stands_for(type(module))
    hooks = _all_modules._global_forward_pre_hooks or _all_modules._global_forward_hooks or module._forward_hooks
    return same and not hooks and all(hook in own_hooks for hook in module._forward_pre_hooks.values())


def is_plain(module: Any) -> bool:
    """Return whether a module is a linear layer with a fast forward and a weight that is not quantised."""
    if type(module) is not torch.nn.Linear or type(module._parameters.get("weight")) is not torch.nn.Parameter:
        return False
    return is_ours(module)


def has_known_gate(module: Any) -> bool:
    """Return whether a module's activation is SiLU without hooks, or it has none."""
    gate = module._modules.get("act_fn")
    if gate is None:
        gate = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    return gate is None or (isinstance(gate, _SILU) and not (gate._forward_pre_hooks or gate._forward_hooks))


class _Snapshot:
    """The parts of a module, their parameters and their forwards at one time.

    Parameters
    ----------
    module : torch.nn.Module
        Its parts have no hooks. The module itself is not recorded.
    """

    def __init__(self, module: Any) -> None:
        self._parts = list(module.modules())[1:]
        self._kinds = [type(part) for part in self._parts]
        self._of_classes = [(kind, kind.forward, kind.__call__) for kind in set(self._kinds)]
        tables = [module._modules]
        for part in self._parts:
            tables += [part._modules, part._parameters]
        entries = [(table, key, value) for table in tables for key, value in table.items()]
        entries += [(vars(part), key, vars(part).get(key)) for part in self._parts for key in _WATCHED]
        self._tables, self._keys, self._values = zip(*entries, strict=True)
        self._hooks = [hooks for part in self._parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]

    def holds(self) -> bool:
        """Return whether all of it is the same, and no part has a hook."""
        now = map(dict.get, self._tables, self._keys)
        if not all(map(is_, now, self._values)) or any(self._hooks):
            return False
        if _all_modules._global_forward_pre_hooks or _all_modules._global_forward_hooks:
            return False
        if any(kind.forward is not way or kind.__call__ is not call for kind, way, call in self._of_classes):
            return False
        return all(map(is_, map(type, self._parts), self._kinds))


# By module: a copy of a module is another key, since its parts are others.
_kept: WeakKeyDictionary[Any, tuple[_Snapshot, LayerWeights]] = WeakKeyDictionary()


def own_parts(layer: Any) -> LayerWeights | None:
    """Return the weights of a decoder layer, or None if somebody has wrapped, hooked or changed a part of it.

    Parameters
    ----------
    layer : torch.nn.Module
        With the parts of Llama's, perhaps with norms of queries and keys.
    """
    kept = _kept.get(layer)
    if kept is not None and kept[0].holds():
        return kept[1]
    snapshot, found = _Snapshot(layer), _look_up(layer)
    if found is not None:
        _kept[layer] = (snapshot, found)
    return found


def _look_up(layer: Any) -> LayerWeights | None:
    attention, mlp = layer._modules["self_attn"], layer._modules["mlp"]
    if not (is_ours(attention) and is_ours(mlp) and has_known_gate(mlp)):
        return None
    norms = _norms(layer, ("input_layernorm", "post_attention_layernorm"))
    linears = _linears(attention, ("q_proj", "k_proj", "v_proj", "o_proj"))
    of_mlp = _linears(mlp, ("gate_proj", "up_proj", "down_proj"))
    if not (norms and linears and of_mlp):
        return None
    head_norms = None
    if "q_norm" in attention._modules:
        of_heads = _norms(attention, ("q_norm", "k_norm"))
        if not of_heads or of_heads[0][1] != of_heads[1][1]:
            return None
        head_norms = (of_heads[0][0], *of_heads[1])
    return LayerWeights(norms[0], linears[:3], head_norms, linears[3], norms[1], (of_mlp[0], of_mlp[1], of_mlp[2]))


def _linears(module: Any, names: tuple[str, ...]) -> list[_Linear]:
    """Return weights and biases of linear layers in a module; none if one of them has to be called."""
    found = []
    for name in names:
        part = module._modules[name]
        if not is_plain(part):
            return []
        found.append((part._parameters["weight"], part._parameters["bias"]))
    return found


def _norms(module: Any, names: tuple[str, ...]) -> list[Norm]:
    """Return weights and epsilons of norms in a module; none if one of them has to be called."""
    found = []
    for name in names:
        part = module._modules[name]
        if not is_ours(part):
            return []
        found.append((part._parameters["weight"], part.variance_epsilon))
    return found
