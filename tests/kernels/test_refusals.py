"""What does not fit together is refused before anything reads memory by it."""

from __future__ import annotations

import pytest
import torch

from fused_kv_kernels import (
    ChunkShift,
    ChunkStack,
    RowPlan,
    ShiftStack,
    TransferPlan,
    place_chunks,
    rotation_table,
    row_attention,
    shift_chunks,
    token_scores,
    transfer_deviation,
)

INV_FREQ = 1.0 / (10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@DTYPES
@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((2, 3, 99, 64), (2, 3, 99, 64)),
        ((1, 2, 99, 64), (1, 2, 99, 64)),
        ((2, 2, 99, 32), (2, 2, 99, 32)),
        ((2, 2, 99, 64), (2, 2, 98, 64)),
    ],
    ids=["heads", "batch", "dimensions", "values_length"],
)
def test_row_attention(k: tuple[int, ...], v: tuple[int, ...], dtype: torch.dtype) -> None:
    plan = RowPlan(torch.arange(20), 99)
    with pytest.raises(ValueError, match="do not fit together"):
        row_attention(_zeros(2, 4, 20, 64, dtype=dtype), _zeros(*k, dtype=dtype), _zeros(*v, dtype=dtype), plan, 0.1)


@DTYPES
def test_token_scores(dtype: torch.dtype) -> None:
    q, k = _zeros(4, 2, 64, dtype=dtype), _zeros(2, 10, 64, dtype=dtype)
    for rows in ([5, 10], [-1, 3]):
        with pytest.raises(ValueError, match="lie outside the 10 keys"):
            token_scores(q, k, torch.tensor(rows), 0.1)
    with pytest.raises(ValueError, match="do not fit together"):
        token_scores(q[:3], k, torch.tensor([1, 2]), 0.1)
    with pytest.raises(ValueError, match="do not fit together"):
        token_scores(q, k, torch.tensor([1, 2, 3]), 0.1)
    assert torch.equal(token_scores(q[:, :0], k, torch.empty(0, dtype=torch.int64), 0.1), torch.zeros(10))


@DTYPES
@pytest.mark.parametrize(("start", "heads"), [(-1, 3), (15, 3), (0, 2)], ids=["before", "behind", "heads"])
def test_placing_chunks(start: int, heads: int, dtype: torch.dtype) -> None:
    layer, chunk = _zeros(2, 3, 20, 64, dtype=dtype), _zeros(2, 1, heads, 11, 64, dtype=dtype)
    table = rotation_table(torch.tensor([1]), INV_FREQ)
    with pytest.raises(ValueError, match=f"does not fit into a layer .* at {start}"):
        place_chunks([(chunk[0, 0], chunk[1, 0])], [start], table, *layer)
    with pytest.raises(ValueError, match=f"does not fit into a layer .* at {start}"):
        ChunkStack([(chunk[0], chunk[1])], [start], [table]).place(0, *layer)


@DTYPES
@pytest.mark.parametrize(
    ("start", "inside", "layer_idx"),
    [(-1, slice(0, 5), 0), (16, slice(0, 5), 0), (0, slice(3, 12), 0), (0, slice(0, 5), 2)],
    ids=["before", "behind", "more_than_there_are", "layer"],
)
def test_shifting_chunks(start: int, inside: slice, layer_idx: int, dtype: torch.dtype) -> None:
    parts = (torch.zeros(2, 3, 11, 64, dtype=torch.int8), torch.zeros(2, 3, 11, 1))
    shifts, layer = [ChunkShift(start, inside, 0.5, parts, parts)], _zeros(2, 3, 20, 64, dtype=dtype)
    table = rotation_table(torch.tensor([1]), INV_FREQ)
    with pytest.raises(ValueError, match=f"does not fit into layer {layer_idx}"):
        shift_chunks(shifts, layer_idx, table, *layer)
    with pytest.raises(ValueError, match=f"does not fit into layer {layer_idx}"):
        ShiftStack(shifts, [table] * 2).add(layer_idx, *layer)


@DTYPES
@pytest.mark.parametrize(
    "wrong",
    [{"selected": torch.tensor([5, 30])}, {"fresh_rows": torch.tensor([1, 4])}, {"spans": torch.tensor([[4, 31]])}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_transfer(wrong: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    table = rotation_table(torch.arange(30), INV_FREQ)
    right = {"selected": torch.tensor([5, 9]), "fresh_rows": torch.tensor([1, 2]), "spans": torch.tensor([[4, 12]])}
    plan = TransferPlan(**{**right, **wrong}, weights=torch.tensor([0.3]))
    with pytest.raises(ValueError, match="do not fit together"):
        transfer_deviation(plan, table, *_zeros(2, 3, 4, 64, dtype=dtype), *_zeros(2, 3, 40, 64, dtype=dtype))
