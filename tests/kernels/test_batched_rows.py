"""Row attention in Triton against its reference: ragged batches, key positions, splits, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import RowPlan, UnsupportedOperandsError, batched_row_attention, row_attention
from fused_kv_kernels.reference import batched_row_attention_reference
from fused_kv_kernels.scoring import Scoring

SHAPES = {
    "one_row": (1, 4, 4, 64, 70, [69]),
    "first_key_only": (2, 4, 2, 64, 33, [0]),
    "all_in_first_block": (1, 2, 1, 64, 100, list(range(20))),
    "tail": (1, 2, 1, 64, 131, list(range(115, 131))),
    "scattered_gqa_7": (1, 7, 1, 128, 150, list(range(0, 150, 11))),
    "mha_dim_80": (2, 2, 2, 80, 65, [0, 3, 31, 32, 33, 64]),
    "gqa_16_dim_96": (1, 16, 1, 96, 40, [1, 7, 39]),
    "dim_256": (1, 2, 1, 256, 50, [5, 49]),
    "dense": (1, 3, 1, 64, 64, list(range(64))),
}


def _tensors(
    shape: tuple[int, int, int, int, int, list[int]], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, q_heads, kv_heads, dim, keys, rows = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, q_heads, len(rows), dim, generator=generator).to(device, dtype)
    k = torch.randn(batch, kv_heads, keys, dim, generator=generator).to(device, dtype)
    v = torch.randn(batch, kv_heads, keys, dim, generator=generator).to(device, dtype)
    return q, k, v, torch.tensor(rows, dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_reference(
    shape: tuple[int, int, int, int, int, list[int]], dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v, positions = _tensors(shape, dtype, device)
    scale = shape[3] ** -0.5
    out, lse = batched_row_attention(q, k, v, positions, scale)
    want, want_lse = batched_row_attention_reference(q.float(), k.float(), v.float(), positions, scale)
    assert out.dtype == dtype
    assert_near(out, want, dtype)
    assert_near(lse, want_lse, dtype)
    planned = row_attention(q, k, v, RowPlan(positions, shape[4]), scale)
    assert torch.equal(planned, out)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    keys=st.integers(1, 90),
    groups=st.integers(1, 16),
    dim=st.sampled_from([16, 40, 64, 80, 96, 128, 256]),
)
def test_ragged_batches(data: st.DataObject, keys: int, groups: int, dim: int, device: torch.device) -> None:
    rows = data.draw(st.integers(0, min(keys, 12)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    q, k, v, _ = _tensors((2, groups, 1, dim, keys, [0] * rows), dtype, device, seed=keys)
    lists = [sorted(data.draw(st.sets(st.integers(0, keys + 3), min_size=rows, max_size=rows))) for _ in range(2)]
    extras = {
        "q_lengths": torch.tensor(data.draw(st.tuples(*[st.integers(0, rows)] * 2)), device=device),
        "kv_lengths": torch.tensor(data.draw(st.tuples(*[st.integers(0, keys)] * 2)), device=device),
    }
    if data.draw(st.booleans()):
        stands = [data.draw(st.permutations(range(keys))), list(range(3, keys + 3))]
        extras["kv_positions"] = torch.tensor(stands, device=device)
    positions = torch.tensor(lists, device=device)
    out, lse = batched_row_attention(q, k, v, positions, dim**-0.5, **extras)
    want, want_lse = batched_row_attention_reference(q.float(), k.float(), v.float(), positions, dim**-0.5, **extras)
    assert_near(out, want, dtype)
    assert_near(lse, want_lse, dtype)


@pytest.mark.parametrize("splits", [1, 2, 5, 13])
def test_splitting_the_keys_changes_nothing(splits: int, device: torch.device) -> None:
    """Also where splits are more than the blocks of keys, or lie beyond what the rows may see."""
    from fused_kv_kernels.triton_ops import row_attention as in_triton

    q, k, v, positions = _tensors((2, 6, 2, 64, 300, [2, 100, 251]), torch.float32, device)
    out, lse = in_triton.row_attention(q, k, v, positions, Scoring(0.125), splits=splits)
    want, want_lse = batched_row_attention_reference(q, k, v, positions, 0.125)
    assert_near(out, want, torch.float32)
    assert_near(lse, want_lse, torch.float32)


def test_splits_fill_the_device() -> None:
    from fused_kv_kernels.triton_ops.splits import choose_splits

    assert choose_splits(blocks=200, keys=32768, programs=132) == 1
    assert choose_splits(blocks=4, keys=32768, programs=132) == 64
    assert choose_splits(blocks=40, keys=32768, programs=132) == 6
    assert choose_splits(blocks=4, keys=300, programs=132) == 1


def test_what_lies_beyond_the_rows_is_not_read(device: torch.device) -> None:
    q, k, v, positions = _tensors((1, 2, 1, 64, 200, [3, 40, 70]), torch.float32, device)
    out, _ = batched_row_attention(q, k, v, positions, 0.125)
    k[:, :, 71:] = v[:, :, 71:] = float("nan")
    again, _ = batched_row_attention(q, k, v, positions, 0.125)
    assert torch.equal(out, again)
    shifted, _ = batched_row_attention(q, k, v, positions, 0.125, kv_positions=torch.arange(200, device=device))
    assert_near(shifted, out, torch.float32)


def test_damage_is_not_hidden(device: torch.device) -> None:
    """A row that sees NaN is NaN, not zero, and no other row is."""
    q, k, v, positions = _tensors((1, 2, 1, 64, 60, [3, 40]), torch.float32, device)
    k[:, :, 20] = float("nan")
    out, _ = batched_row_attention(q, k, v, positions, 0.125)
    assert out[:, :, 1].isnan().all()
    assert not out[:, :, 0].isnan().any()


def test_strided_operands(device: torch.device) -> None:
    """Queries laid out [B, R, Hq, D] and keys that are a slice of a longer cache, as the engine has them."""
    q, k, v, positions = _tensors((2, 4, 2, 64, 90, [1, 50, 60]), torch.float32, device)
    loose_q = q.transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = batched_row_attention(loose_q, k[:, :, :61], v[:, :, :61], positions, 0.125)
    assert_near(out, batched_row_attention_reference(q, k, v, positions, 0.125)[0], torch.float32)


def test_strided_positions(device: torch.device) -> None:
    """Positions may be a slice with a step, or a column of a table."""
    q, k, v, positions = _tensors((2, 4, 2, 64, 90, list(range(0, 90, 11))), torch.float32, device)
    want, _ = batched_row_attention_reference(q, k, v, positions, 0.125)
    step = torch.arange(90, device=device)[::11]
    assert step.stride(0) == 11
    assert_near(row_attention(q, k, v, RowPlan(step, 90), 0.125), want, torch.float32)
    columns = torch.stack((positions, positions), dim=1).T
    stands = torch.arange(0, 180, device=device)[::2] // 2
    assert_near(batched_row_attention(q, k, v, columns, 0.125, kv_positions=stands)[0], want, torch.float32)


def test_no_rows(device: torch.device) -> None:
    q, k, v, positions = _tensors((1, 3, 1, 16, 10, []), torch.float32, device)
    out, lse = batched_row_attention(q, k, v, positions, 1.0)
    assert out.shape == (1, 3, 0, 16)
    assert lse.shape == (1, 3, 0)


@pytest.mark.parametrize("rows", [[1, 1], [2, 1], [-1, 3]], ids=["duplicate", "descending", "negative"])
def test_refuses_positions(rows: list[int]) -> None:
    q, k, v, positions = _tensors((1, 3, 1, 16, 10, rows), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="ascending"):
        batched_row_attention(q, k, v, positions, 1.0)


def test_refuses_lengths_and_shapes() -> None:
    q, k, v, positions = _tensors((1, 3, 1, 16, 10, [1, 2]), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"kv_lengths=\[11\]"):
        batched_row_attention(q, k, v, positions, 1.0, kv_lengths=torch.tensor([11]))
    with pytest.raises(ValueError, match="do not fit together"):
        batched_row_attention(q, k, v, positions[:1], 1.0)
    with pytest.raises(ValueError, match="scale"):
        batched_row_attention(q, k, v, positions, 0.0)


@pytest.mark.parametrize(
    ("dtype", "q_heads", "dim", "reason"),
    [
        (torch.float64, 1, 64, "float32"),
        (torch.float32, 17, 64, "1 to 16 times"),
        (torch.float32, 1, 520, "at most 512"),
    ],
    ids=["dtype", "groups", "dim"],
)
def test_what_triton_cannot_do_is_an_error(
    dtype: torch.dtype, q_heads: int, dim: int, reason: str, device: torch.device
) -> None:
    q, k, v, positions = _tensors((1, q_heads, 1, dim, 10, [1]), dtype, device)
    with pytest.raises(UnsupportedOperandsError, match=reason) as caught:
        batched_row_attention(q, k, v, positions, 1.0)
    assert str(list(q.shape)) in str(caught.value)
