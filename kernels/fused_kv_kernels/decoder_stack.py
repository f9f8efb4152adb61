"""Several decoder layers of a step that decodes: one new token of each of several sequences, through all of them.

With a row for each sequence, what Python does between two operators counts beside what they take. On a CPU in bfloat16
the layers are one native call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .decode_attention import DecodeCaches, decode_attention
from .decoder_layer import few_row_heads, few_row_mlp
from .linears import Layer, check_linears
from .native import Norm, is_dense_as, most_linear_rows, native_decode_layers

__all__ = ["LayerWeights", "decode_layers"]

_NONE = None, None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of a decoder layer as Llama's have them.

    Parameters
    ----------
    norm, mlp_norm : tuple of (Tensor, float)
        Weight ``[H]`` and epsilon of the norms before attention and before the MLP.
    heads : sequence of (Tensor, Tensor or None)
        Weight ``[heads * D, H]`` and bias of the projections to queries, keys and values.
    head_norms : tuple of (Tensor, Tensor, float) or None
        Weights ``[D]`` of the norms of each head's queries and keys, and their common epsilon.
    output : tuple of (Tensor, Tensor or None)
        The projection ``[H, Hq * D]`` behind attention.
    mlp : tuple of (Tensor, Tensor or None)
        Gate, up ``[W, H]`` and down ``[H, W]``.
    """

    norm: Norm
    heads: Sequence[Layer]
    head_norms: tuple[Tensor, Tensor, float] | None
    output: Layer
    mlp_norm: Norm
    mlp: tuple[Layer, Layer, Layer]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all weights, and the biases that there are."""
        yield from (self.norm[0], self.mlp_norm[0], *(self.head_norms or ())[:2])
        for weight, bias in (*self.heads, self.output, *self.mlp):
            yield weight
            if bias is not None:
                yield bias

    def shapes(self) -> list[torch.Size | None]:
        """Return the shapes of all weights and biases, in the same order for all layers."""
        pairs = (*self.heads, self.output, *self.mlp, (self.norm[0], self.mlp_norm[0]), (self.head_norms or _NONE)[:2])
        return [None if one is None else one.shape for pair in pairs for one in pair]

    def check(self, hidden: int, head_dim: int) -> None:
        """Raise ValueError unless the shapes fit together, and rows of `hidden` elements and heads of `head_dim`."""
        (gate, _), (up, _), (down, _) = self.mlp
        check_linears(hidden, (*self.heads, *self.mlp[:2]))
        check_linears(gate.shape[0], self.mlp[2:])
        check_linears(self.heads[0][0].shape[0], (self.output,))
        norms = [self.norm[0], self.mlp_norm[0]]
        counts = [weight.shape[0] for weight, _ in self.heads]
        if (
            any(norm.shape != (hidden,) for norm in norms)
            or any(norm.shape != (head_dim,) for norm in (self.head_norms or ())[:2])
            or len(counts) != 3
            or any(count % head_dim for count in counts)
            or counts[0] % counts[1]
            or counts[1] != counts[2]
            or up.shape != gate.shape
            or not down.shape[0] == self.output[0].shape[0] == hidden
        ):
            msg = f"weights of shapes {self.shapes()} are no decoder layer of rows of {hidden} and heads of {head_dim}"
            raise ValueError(msg)


def decode_layers(
    x: Tensor,
    layers: Sequence[LayerWeights],
    caches: DecodeCaches,
    first_layer: int,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    *,
    first_keys: Tensor | None = None,
) -> Tensor:
    """Return what leaves the last of several decoder layers, each with attention to the sequences' caches.

    Parameters
    ----------
    x : Tensor
        float32 ``[1, R, H]``, the residual stream: row ``r`` is of sequence ``r``'s new token.
    layers : sequence of LayerWeights
        Alike in shape, at least one.
    caches : DecodeCaches
        Receive the new tokens' keys and values; as wide in values as in keys.
    first_layer : int
        Of the caches: which one belongs to the first of `layers`.
    cos, sin : Tensor
        ``[1, R, rotary]``, as :func:`fused_kv_kernels.few_row_heads` takes them.
    scale : float
        Multiplies the scores of attention.
    first_keys : Tensor, optional
        int64 ``[R]``, as :func:`fused_kv_kernels.decode_attention` takes them; the same for all layers.

    Returns
    -------
    Tensor
        float32 ``[1, R, H]``: bit by bit what :func:`few_row_heads`, :func:`decode_attention` and :func:`few_row_mlp`
        give layer by layer.

    Raises
    ------
    ValueError
        If the shapes do not fit together, `x` is not float32, the caches are not of the layers' dtype, or there is no
        layer.
    """
    if not caches.num_rows:
        return x
    head_dim = caches.caches[0][0].shape[4]
    _check(x, layers, caches, first_layer, head_dim)
    if _is_native(x, layers, caches, (cos, sin)):
        window = caches.checked_window(first_keys)
        return native_decode_layers(x, layers, caches, first_layer, (cos, sin), window, scale)
    for index, layer in enumerate(layers):
        q, k, v = few_row_heads(x, *layer.norm, layer.heads, cos, sin, head_dim, layer.head_norms)
        attended = decode_attention(q, k, v, caches, first_layer + index, scale, first_keys=first_keys)
        x = few_row_mlp(x, *layer.mlp_norm, *layer.mlp, (attended.transpose(1, 2).flatten(2), layer.output))
    return x


def _check(x: Tensor, layers: Sequence[LayerWeights], caches: DecodeCaches, first_layer: int, head_dim: int) -> None:
    shapes = layers[0].shapes() if layers else []
    if not layers or any(layer.shapes() != shapes for layer in layers):
        msg = f"{len(layers)} decoder layers {[layer.shapes() for layer in layers]} are none, or of several shapes"
        raise ValueError(msg)
    layers[0].check(x.shape[-1], head_dim)
    keys, values = caches.caches[0]
    fits = keys.shape[2] * head_dim == layers[0].heads[1][0].shape[0] and values.shape[4] == head_dim
    dtype = layers[0].norm[0].dtype
    fits = fits and x.dtype == torch.float32 and keys.dtype == dtype
    if not fits or x.dim() != 3 or x.shape[:2] != (1, caches.num_rows):
        msg = (
            f"x {list(x.shape)} {x.dtype} and layers {shapes} {dtype} do not fit {caches.num_rows} caches of "
            f"{list(keys.shape)} and {list(values.shape)} {keys.dtype}"
        )
        raise ValueError(msg)
    if not 0 <= first_layer <= keys.shape[0] - len(layers):
        msg = f"the caches have {keys.shape[0]} layers, not {len(layers)} from {first_layer} on"
        raise ValueError(msg)


def _is_native(x: Tensor, layers: Sequence[LayerWeights], caches: DecodeCaches, tables: tuple[Tensor, Tensor]) -> bool:
    first, (_, rows, hidden) = layers[0], x.shape
    linears = (*first.heads, first.output, *first.mlp)
    width, attended = first.mlp[0][0].shape[0], first.heads[0][0].shape[0]
    rotary, like = tables[0].shape[-1], first.norm[0]
    return (
        caches.entries is not None
        and like.dtype == torch.bfloat16
        and 0 < rows <= most_linear_rows(like.dtype)
        and tables[0].shape == tables[1].shape == (1, rows, rotary)
        and rotary % 2 == 0
        and rotary <= caches.caches[0][0].shape[4]
        and hidden % 32 == width % 32 == attended % 32 == 0
        and all(weight.shape[0] % 4 == 0 for weight, _ in linears)
        and x.is_cpu
        and is_dense_as(like, *tables, *(one for layer in layers for one in layer.tensors()))
    )
