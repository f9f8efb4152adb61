"""The pass that a forward runs in: the only thing that a cache and an attention function ask.

transformers hands keyword arguments on to attention in most models, but not in all, and to a cache in none. So the pass
that a thread runs is a context variable: :func:`running` sets it, :func:`current_pass` reads it, and there is no other
way to reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor

from fused_kv_kernels import LayerWeights, Norm
from fused_kv_llm.errors import FusedKVError, UnsupportedModelError
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.pausing import PausedError, Pausing
from fused_kv_llm.model.residual import ResidualStream

__all__ = ["LayerPass", "Linears", "StopForwardError", "current_pass", "required_pass", "running"]


class StopForwardError(Exception):
    """Ends a forward that has brought what it was run for.

    An exception, since the loop over the layers is transformers' own: a shorter list of layers would do as well, but
    the model has one list for all threads.
    """


class Linears(Protocol):
    """Computes linear layers in the model's place; they have no hooks and are not wrapped."""

    def __call__(self, modules: Sequence[Any], x: Tensor) -> list[Tensor] | None:
        """Return the outputs of layers that read the same input ``[..., I]``, or None to leave them to the model."""

    def gated_mlp(self, gate: Any, down: Any, x: Tensor) -> Tensor | None:
        """Return ``down(silu(gate(x)) * up(x))``, or None to have the layers asked for one after another.

        The up layer is the one that reads the same input as the gate.
        """

    def normed(self, modules: Sequence[Any], x: Tensor, norm: Norm) -> list[Tensor] | None:
        """Return the outputs of layers that read ``rms_norm(x)``, or None to have all asked for one after another."""

    def attended_mlp(self, layer: Any, x: Tensor, attended: Tensor, norm: Norm) -> Tensor | None:
        """Return the second half of a decoder layer, see :func:`.few_row_mlp`, or None as for :meth:`normed`."""


class LayerPass:
    """A forward through all layers of a model, whatever its rows are.

    The seam tells it of every layer, in order: that its keys are there (:meth:`enter_layer`), and that it attends
    (:meth:`run_attention`), to those or to what an earlier layer was given. A layer that does anything else computes
    its attention elsewhere, which is an error.

    Attributes
    ----------
    final_rows : slice, Tensor or None
        Rows whose logits are wanted: the last one, those listed (int64), or all (None). Nothing uses what the last
        layer makes of the others.
    num_rows : int
        Rows that the pass begins with.
    kv_layer : int
        Whose keys and values the layer that attends sees: its own, or those of an earlier one.
    decodes : bool
        Whether :meth:`run_layers` may run several layers at once.
    pausing : Pausing or None
        Set where the forward may be left between two layers.
    linears : Linears or None
        Computes plain linear layers on a CPU in the model's place.
    residual : ResidualStream
        What layers that the engine computes hand on, in float32.
    head : torch.nn.Module or None
        The model's output head, if what it gives are the logits.
    """

    final_rows: slice | Tensor | None = None
    num_rows: int
    kv_layer: int
    residual: ResidualStream
    decodes: bool = False
    pausing: Pausing | None = None
    linears: Linears | None = None
    head: Any = None

    def begin(self) -> None:
        """Expect the first layer, or the one that the forward was left before."""
        if self.pausing is None or self.pausing.hidden is None:
            self.next_layer, self.residual = 0, ResidualStream()
        self._is_entered = False
        # Weak, since what a layer sees may be a copy, which would be kept for all layers.
        self._given: list[ref[Tensor]] = []

    def end(self) -> None:
        """Drop what nothing needs any more: the forward was not left between two layers."""
        self.residual.forget()
        if self.pausing is not None:
            self.pausing.hidden = None

    def enter_layer(self, layer_idx: int) -> None:
        """Note that a layer's keys and values are given to the cache.

        Raises
        ------
        UnsupportedModelError
            If the layer before it did not attend through the seam.
        """
        if layer_idx != self.next_layer or self._is_entered:
            raise _unreached(self.next_layer)
        self._is_entered = True

    def given(self, seen: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Note what a cache gives a layer, keys and values ``[B, Hkv, N, D]``, and return it."""
        self._given.append(ref(seen[0]))
        return seen

    def run_attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Attend, as :meth:`attend` does, and note that the layer did.

        Raises
        ------
        UnsupportedModelError
            If the layer's keys are not those of the cache, or a layer was left out.
        """
        source = layer_idx if self._is_entered else self._layer_given(k)
        if layer_idx != self.next_layer or source is None:
            raise _unreached(self.next_layer)
        self.kv_layer = source
        self.next_layer, self._is_entered = layer_idx + 1, False
        return self.attend(layer_idx, q, k, v, rule)

    def run_layers(
        self, hidden: Tensor, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Run the next layers, attention included, and note that they attended.

        Parameters
        ----------
        hidden : Tensor
            float32 ``[1, R, H]``: the residual stream.
        layers : sequence of LayerWeights
        cos, sin : Tensor
            ``[1, R, rotary]``.
        rule : AttentionRule
            Of all of them.

        Returns
        -------
        Tensor
            float32 ``[1, R, H]``.
        """
        if self._is_entered:
            raise _unreached(self.next_layer)
        left = self.decode(hidden, layers, cos, sin, rule)
        self.next_layer += len(layers)
        return left

    def _layer_given(self, keys: Tensor) -> int | None:
        return next((layer for layer, given in enumerate(self._given) if given() is keys), None)

    def check_complete(self, num_layers: int) -> None:
        """Make sure that every layer attended through the seam.

        Raises
        ------
        UnsupportedModelError
            If one did not.
        """
        if self.next_layer != num_layers:
            raise _unreached(self.next_layer)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """Return the attention output ``[B, Hq, R, Dv]`` of queries ``[B, Hq, R, D]``, or end the forward."""
        raise NotImplementedError

    def decode(
        self, hidden: Tensor, layers: Sequence[LayerWeights], cos: Tensor, sin: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Return what :meth:`run_layers` returns, where the pass decodes."""
        raise NotImplementedError


_Pass = TypeVar("_Pass", bound=LayerPass)
_current: ContextVar[LayerPass | None] = ContextVar("fused_kv_pass", default=None)


def current_pass() -> LayerPass | None:
    """Return the pass that is being run here; None in a user's own forward, and while a model is compiled."""
    return None if torch.compiler.is_compiling() else _current.get()


def required_pass(kind: type[_Pass]) -> _Pass:
    """Return the pass that is being run here, which is of a given kind.

    Raises
    ------
    FusedKVError
        If there is none: what was called takes part in fused passes only.
    """
    found = current_pass()
    if not isinstance(found, kind):
        raise FusedKVError(
            "A cache of the engine was given to a forward of its own: it works in the engine's passes only."
        )
    return found


@contextmanager
def running(forward_pass: LayerPass) -> Iterator[None]:
    """Make a pass the current one of what is called inside."""
    forward_pass.begin()
    token, is_left = _current.set(forward_pass), False
    try:
        yield
    except PausedError:
        is_left = True
        raise
    finally:
        _current.reset(token)
        if not is_left:
            forward_pass.end()


def _unreached(layer_idx: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Layer {layer_idx} of the model does not attend through the engine: its attention was patched, wrapped or "
        "exchanged, its class attends by itself or keeps its keys elsewhere, or the configuration names more layers "
        "than there are. Nothing was reused: this model cannot be fused as it is."
    )
