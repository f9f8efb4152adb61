"""A decoder layer without its attention, for few rows: on a CPU in bfloat16 one native call before and one after it.

With as few rows as a question has, the time that Python takes between two operators is comparable to theirs.

What goes from layer to layer, the residual stream, is float32 whatever the dtype of the layers is. Their inputs and
what they add to it are rounded. If the sums were, too, that would be most of a bfloat16 model's rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .elementwise import check_residual, gated_silu, residual_norm, rms_norm, rotate_rows_
from .linears import Layer, check_linears, few_row_linears
from .native import is_dense_as, most_linear_rows, native_gated_mlp, native_heads, takes_linears

__all__ = ["few_row_heads", "few_row_mlp"]


def few_row_heads(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    layers: Sequence[Layer],
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    head_norms: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what attention takes of the first half of a decoder layer: queries, keys and values of the norm of `x`.

    Parameters
    ----------
    x : Tensor
        float32 ``[B, R, H]``: the residual stream.
    weight : Tensor
        The norm's, ``[H]``, in the dtype of the layers.
    epsilon : float
        The norm's.
    layers : sequence of (Tensor, Tensor or None)
        Of queries, keys and values: weights ``[heads * D, H]``, each with a bias or none.
    cos, sin : Tensor
        ``[1 or B, R, rotary]``, as :func:`fused_kv_kernels.rotate_rows_` takes them.
    head_dim : int
        ``D``.
    head_norms : tuple of (Tensor, Tensor, float) or None
        Weights ``[D]`` and the epsilon of norms that each head of queries and keys goes through before it is rotated.

    Returns
    -------
    tuple of Tensor
        ``[B, heads, R, D]`` in the dtype of the layers, laid out ``[B, R, heads, D]`` in memory: bit by bit what the
        operators by themselves give, but for subnormal sums, which become zero.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or `x` is not float32.
    """
    check_linears(x.shape[-1], layers)
    check_residual(x)
    norms = () if head_norms is None else head_norms[:2]
    whole = len(layers) == 3 and all(one.shape[0] % head_dim == 0 for one, _ in layers)
    if not whole or x.dim() != 3 or weight.shape != x.shape[2:] or any(one.shape != (head_dim,) for one in norms):
        msg = (
            f"x {list(x.shape)}, a norm {list(weight.shape)}, layers of {[one.shape[0] for one, _ in layers]} outputs, "
            f"heads of {head_dim} and their norms {[list(one.shape) for one in norms]} do not fit together"
        )
        raise ValueError(msg)
    tables_fit = cos.shape == sin.shape and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == x.shape[1]
    if (
        tables_fit
        and cos.shape[2] % 2 == 0
        and cos.shape[2] <= head_dim
        and _are_few(x, weight)
        and takes_linears(weight, layers)
        and is_dense_as(weight, cos, sin, *norms)
    ):
        return native_heads(x, weight, epsilon, layers, cos, sin, head_dim, head_norms)
    projected = few_row_linears(residual_norm(x, weight, epsilon), layers)
    q, k, v = (part.reshape(*x.shape[:2], part.shape[-1] // head_dim, head_dim) for part in projected)
    if head_norms is not None:
        q, k = (rms_norm(part, one, head_norms[2]) for part, one in zip((q, k), norms, strict=True))
    return rotate_rows_(q.transpose(1, 2), cos, sin), rotate_rows_(k.transpose(1, 2), cos, sin), v.transpose(1, 2)


def few_row_mlp(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    gate: Layer,
    up: Layer,
    down: Layer,
    attended: tuple[Tensor, Layer] | None = None,
) -> Tensor:
    """Return the second half of a decoder layer, ``x + down(silu(gate(n)) * up(n))`` with ``n = residual_norm(x)``.

    Parameters
    ----------
    x : Tensor
        float32 ``[..., H]``: the residual stream.
    weight : Tensor
        The norm's, ``[H]``, in the dtype of the layers.
    epsilon : float
        The norm's.
    gate, up, down : tuple of (Tensor, Tensor or None)
        Weights ``[W, H]``, ``[W, H]`` and ``[H, W]``, each with a bias or none.
    attended : tuple of (Tensor, layer) or None
        What attention gave, ``[..., A]`` in the dtype of the layers, and the linear layer ``o`` ``[H, A]`` behind it:
        then ``x + o(attended)`` takes the place of `x`.

    Returns
    -------
    Tensor
        float32 ``[..., H]``, bit by bit what the operators by themselves give, but for subnormal sums, which become
        zero.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or `x` is not float32.
    """
    check_residual(x)
    _check_mlp(x, weight, gate, up, down)
    if attended is not None:
        _check_attended(x, *attended)
    if (
        _are_few(x, weight)
        and takes_linears(weight, (gate, up))
        and takes_linears(weight, (down,), gate[0].shape[0])
        and weight.is_contiguous()
        and (attended is None or (attended[0].dtype == weight.dtype and takes_linears(attended[0], (attended[1],))))
    ):
        return native_gated_mlp(x, weight, epsilon, (gate, up, down), attended)
    if attended is not None:
        x = x + few_row_linears(attended[0], (attended[1],))[0]
    gated = gated_silu(*few_row_linears(residual_norm(x, weight, epsilon), (gate, up)))
    (given,) = few_row_linears(gated, (down,))
    # A sum of our own holds the next one: for many rows, new memory costs more than adding.
    return x + given if attended is None else x.add_(given)


def _are_few(x: Tensor, weight: Tensor) -> bool:
    """Return whether native operators of the weight's dtype take all rows of the residual stream."""
    return x.is_cpu and 0 < x.numel() <= most_linear_rows(weight.dtype) * x.shape[-1]


def _check_mlp(x: Tensor, weight: Tensor, gate: Layer, up: Layer, down: Layer) -> None:
    check_linears(x.shape[-1], (gate, up))
    check_linears(gate[0].shape[0], (down,))
    if up[0].shape != gate[0].shape or down[0].shape[0] != x.shape[-1] or weight.shape != x.shape[-1:]:
        msg = (
            f"x {list(x.shape)}, a norm {list(weight.shape)} and an MLP of {list(gate[0].shape)}, {list(up[0].shape)} "
            f"and {list(down[0].shape)} do not fit together"
        )
        raise ValueError(msg)


def _check_attended(x: Tensor, rows: Tensor, layer: Layer) -> None:
    check_linears(rows.shape[-1], (layer,))
    if rows.shape[:-1] != x.shape[:-1] or layer[0].shape[0] != x.shape[-1]:
        msg = f"x {list(x.shape)}, attended rows {list(rows.shape)} and o {list(layer[0].shape)} do not fit together"
        raise ValueError(msg)
