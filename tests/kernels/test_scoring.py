"""Windows, caps, sinks and values of another width, in row attention and token scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import TOLERANCE, assert_near
from torch import Tensor

from fused_kv_kernels import RowPlan, row_attention, token_scores
from fused_kv_kernels.reference import row_attention_reference, token_scores_reference
from fused_kv_kernels.scoring import Scoring

DTYPES = (torch.float32, torch.bfloat16)
INFINITE = float("inf")


@dataclass(frozen=True)
class Case:
    """Rows that see some keys, and how they score them."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    first_keys: Tensor | None
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        return float(self.k.shape[3]) ** -0.5

    def compare(self, block_rows: int = 64) -> None:
        """Rows against their reference, and the scores of the first of the batch against theirs."""
        keys, dtype = self.k.shape[2], self.q.dtype
        plan = RowPlan(self.positions, keys, block_rows, first_keys=self.first_keys)
        got = row_attention(self.q, self.k, self.v, plan, self.scale, **self.options)
        # In float32 the reference would be rounded as much as the operator, and both errors would count.
        wide = [part.double() for part in (self.q, self.k, self.v)]
        options = {**self.options, "first_keys": self.first_keys}
        assert got.dtype == dtype
        assert_near(got, row_attention_reference(*wide, self.positions, self.scale, **options), dtype)
        if self.positions.numel():
            scores = token_scores(self.q[0], self.k[0], self.positions, self.scale, **options)
            want = token_scores_reference(wide[0][0], wide[1][0], self.positions, self.scale, **options)
            assert_near(scores * keys, want * keys, dtype)


def make_case(
    rows: list[int],
    keys: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    window: int | None = None,
    device: torch.device | str = "cpu",
    batch: int = 1,
    **options: Any,
) -> Case:
    """Make a case; ``window`` keys end with a row's own.

    Large queries in float32, so that scores reach all parts of a cap. In plain torch bfloat16 rounds scores, so that
    large ones would be far off.
    """
    generator = torch.Generator().manual_seed(keys + len(rows))
    size = 4 if dtype == torch.float32 else 1
    q = size * torch.randn(batch, len(rows), heads[0], dims[0], generator=generator).transpose(1, 2)
    k = torch.randn(batch, heads[1], keys + 5, dims[0], generator=generator)[:, :, :keys]
    v = torch.randn(batch, heads[1], keys + 5, dims[1], generator=generator)[:, :, :keys]
    positions = torch.tensor(rows, dtype=torch.int64, device=device)
    first_keys = None if window is None else (positions - window + 1).clamp(min=0)
    return Case(*(part.to(device, dtype) for part in (q, k, v)), positions, first_keys, options)


def sinks_of(kind: str | None, heads: int, device: torch.device | str = "cpu") -> Tensor | None:
    """Return sinks of ordinary size, so large that nothing else counts, none at all, or all of these by turns."""
    if kind is None:
        return None
    of_kind = {"usual": [0.5, -2.0, 3.0], "large": [80.0], "none": [-INFINITE], "mixed": [1.0, -INFINITE, 90.0]}[kind]
    return torch.tensor([of_kind[head % len(of_kind)] for head in range(heads)], device=device)


SINKS = st.sampled_from([None, None, "usual", "large", "none", "mixed"])


@settings(max_examples=80)
@given(
    keys=st.integers(1, 500),
    data=st.data(),
    groups=st.sampled_from([1, 3, 7]),
    dims=st.sampled_from([(64, 64), (16, 48), (80, 80), (192, 128), (17, 5), (128, 128)]),
    softcap=st.sampled_from([None, 0.5, 5.0, 50.0]),
    sinks=SINKS,
    block=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_window_cap_and_sinks(
    keys: int,
    data: st.DataObject,
    groups: int,
    dims: tuple[int, int],
    softcap: float | None,
    sinks: str | None,
    block: int,
    dtype: torch.dtype,
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, keys - 1), max_size=150)))
    window = data.draw(st.sampled_from([None, 1, 2, 7, 63, 130, 400, 10_000]))
    options = {"softcap": softcap, "sinks": sinks_of(sinks, 2 * groups)}
    make_case(rows, keys, (2 * groups, 2), dims, dtype, window, **options).compare(block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "window", "dims"),
    [
        (range(700), 512, (64, 64)),
        (range(700), 40, (64, 64)),
        (range(0, 700, 3), 1, (64, 64)),
        (range(5, 700, 9), 200, (256, 256)),
        (range(690, 700), 256, (128, 64)),
        ([699], 100, (64, 64)),
        ([0], 100, (64, 64)),
        (range(700), 700, (64, 64)),
    ],
    ids=["dense", "narrow", "itself", "scattered", "question", "last", "first", "all"],
)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4)], ids=str)
def test_windows(rows: range, window: int, dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype) -> None:
    for options in ({}, {"softcap": 20.0, "sinks": sinks_of("mixed", heads[0])}):
        make_case(list(rows), 700, heads, dims, dtype, window, batch=2, **options).compare()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("together", [24, 32])
def test_a_window_that_begins_behind_a_whole_block_of_keys(together: int, dtype: torch.dtype) -> None:
    """The last row of a full block of rows sees none of the keys that the others see.

    Writing beyond its weights damages memory, which is found at some later time, or ends the process.
    """
    case = make_case([*range(100, 99 + together), 690], 700, (1, 1), (64, 64), dtype, window=64)
    for _ in range(50):
        case.compare()


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=80), data=st.data())
def test_windows_of_any_width(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    """Not only those that end a number of keys behind their row, such as chunks that see nothing before them."""
    rows, firsts, at, first = [], [], -1, 0
    for step, advance in steps:
        at += step
        first = min(first + advance, at)
        rows.append(at)
        firsts.append(first)
    dtype = data.draw(st.sampled_from(DTYPES))
    plain = make_case(rows, at + data.draw(st.integers(1, 90)), (6, 2), (64, 64), dtype)
    case = Case(plain.q, plain.k, plain.v, plain.positions, torch.tensor(firsts), {})
    case.compare()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}, {"sinks": torch.tensor([0.1, 0.2])}], ids=str)
def test_keys_before_all_windows_are_not_read(options: dict[str, Any], dtype: torch.dtype) -> None:
    case = make_case(list(range(400, 600, 3)), 600, (2, 2), (64, 64), dtype, 100, **options)
    case.k[:, :, :301] = float("nan")
    case.v[:, :, :301] = float("nan")
    plan = RowPlan(case.positions, 600, first_keys=case.first_keys)
    assert row_attention(case.q, case.k, case.v, plan, 0.125, **options).isfinite().all()


def test_a_cap_as_wide_as_all_scores_is_none() -> None:
    case = make_case(list(range(90)), 90, (4, 2), (64, 64), torch.float32)
    plan = RowPlan(case.positions, 90)
    capped = row_attention(case.q, case.k, case.v, plan, 0.125, softcap=1e6)
    torch.testing.assert_close(capped, row_attention(case.q, case.k, case.v, plan, 0.125), atol=1e-4, rtol=1e-4)


def test_scores_beside_sinks_sum_to_what_the_sinks_leave() -> None:
    case = make_case([40, 41], 60, (2, 2), (64, 64), torch.float32)
    rest = token_scores(case.q[0], case.k[0], case.positions, 0.125, sinks=torch.tensor([3.0, 4.0])).sum()
    assert 0.0 < float(rest) < 1.0
    none = token_scores(case.q[0], case.k[0], case.positions, 0.125, sinks=torch.tensor([200.0, INFINITE])).sum()
    assert float(none) == pytest.approx(0.0, abs=1e-6)


def test_a_window_that_hides_nothing_is_none() -> None:
    rows = torch.arange(10)
    assert RowPlan(rows, 10, first_keys=torch.zeros(10, dtype=torch.int64)).is_dense
    assert not RowPlan(rows, 10, first_keys=(rows - 8).clamp(min=0)).is_dense


@pytest.mark.parametrize(
    ("firsts", "message"),
    [([0, 3, 2], "descend"), ([0, 6, 6], r"first_keys\[1\]=6 must lie in 0..5"), ([-1, 0, 0], r"\[0\]=-1"),
     ([0, 1], "not one for each")],
    ids=["descending", "behind_its_row", "negative", "number"],
)  # fmt: skip
def test_windows_that_are_none_are_refused(firsts: list[int], message: str) -> None:
    rows, first_keys = torch.tensor([1, 5, 9]), torch.tensor(firsts)
    with pytest.raises(ValueError, match=message):
        RowPlan(rows, 10, first_keys=first_keys)
    if message != "descend":
        with pytest.raises(ValueError, match=message):
            token_scores(torch.zeros(1, 3, 8), torch.zeros(1, 10, 8), rows, 1.0, first_keys=first_keys)


@pytest.mark.parametrize("wrong", [0.0, -1.0, INFINITE, float("nan")])
def test_caps_that_are_none_are_refused(wrong: float) -> None:
    x, rows = torch.zeros(1, 1, 3, 8), torch.arange(3)
    with pytest.raises(ValueError, match="must be positive and finite"):
        row_attention(x, x, x, RowPlan(rows, 3), 1.0, softcap=wrong)
    with pytest.raises(ValueError, match="must be positive and finite"):
        token_scores(x[0], x[0], rows, 1.0, softcap=wrong)


def test_sinks_of_other_heads_are_refused() -> None:
    q, k, rows = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.arange(3)
    with pytest.raises(ValueError, match="not one for each of 4 query heads"):
        row_attention(q, k, k, RowPlan(rows, 3), 1.0, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="not one for each of 4 query heads"):
        token_scores(q[0], k[0], rows, 1.0, sinks=torch.zeros(2))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "dims", "window", "options"),
    [
        (range(50), 50, (4, 2), (64, 64), 20, {}),
        (range(0, 150, 6), 150, (6, 2), (64, 64), 1, {}),
        (range(70, 130, 2), 130, (3, 1), (64, 64), 10_000, {"softcap": 3.0}),
        ([5, 77, 140], 141, (7, 1), (80, 80), 64, {"softcap": 30.0, "sinks": "mixed"}),
        (range(40), 40, (3, 3), (64, 64), None, {"sinks": "usual"}),
        (range(50, 90), 90, (4, 2), (96, 64), None, {"sinks": "large"}),
        (range(20, 60), 60, (2, 1), (48, 128), 33, {"softcap": 0.5}),
        ([99], 700, (8, 2), (64, 64), 50, {"sinks": "mixed"}),
        ([698, 699], 700, (2, 2), (128, 128), 512, {"sinks": "none"}),
        ([20, 39], 40, (2, 1), (512, 512), 30, {"softcap": 20.0, "sinks": "usual"}),
        (range(70), 70, (1, 1), (192, 512), None, {}),
    ],
    ids=["window", "itself", "cap", "all_of_it", "sinks", "narrow_values", "wide_values", "decoding", "tail", "dim_512",
         "many_rows_of_512"],
)  # fmt: skip
def test_triton_equals_reference(
    rows: Iterable[int],
    keys: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    options = {**options, "sinks": sinks_of(options.get("sinks"), heads[0], device)}
    make_case(list(rows), keys, heads, dims, dtype, window, device, **options).compare()


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.integers(1, 90),
    data=st.data(),
    groups=st.sampled_from([1, 3]),
    softcap=st.sampled_from([None, 0.5, 5.0]),
    sinks=SINKS,
    splits=st.sampled_from([1, 2, 5]),
)
def test_triton_with_any_split(
    keys: int, data: st.DataObject, groups: int, softcap: float | None, sinks: str | None, splits: int,
    device: torch.device,
) -> None:  # fmt: skip
    """Windows that begin anywhere, and programs that each take a part of the keys."""
    from fused_kv_kernels.triton_ops.row_attention import row_attention as in_triton
    from fused_kv_kernels.triton_ops.token_scores import token_scores as scores_in_triton

    rows = sorted(data.draw(st.sets(st.integers(0, keys - 1), min_size=1, max_size=9)))
    window = data.draw(st.sampled_from([1, 7, 40, 200]))
    options = {"softcap": softcap, "sinks": sinks_of(sinks, 2 * groups, device)}
    case = make_case(rows, keys, (2 * groups, 2), (32, 16), torch.float32, window, device, **options)
    scoring = Scoring(case.scale, **options)
    got, _ = in_triton(case.q, case.k, case.v, case.positions, scoring, first_keys=case.first_keys, splits=splits)
    options["first_keys"] = case.first_keys
    want = row_attention_reference(case.q, case.k, case.v, case.positions, case.scale, **options)
    assert_near(got, want, torch.float32)
    scores = scores_in_triton(case.q, case.k, case.positions, scoring, case.first_keys, splits)
    wanted = token_scores_reference(case.q[0], case.k[0], case.positions, case.scale, **options)
    assert_near(scores * keys, wanted * keys, torch.float32)


def test_triton_reads_no_keys_before_all_windows(device: torch.device) -> None:
    case = make_case(list(range(140, 200, 3)), 200, (2, 2), (64, 64), torch.float32, 50, device)
    case.k[:, :, :91] = float("nan")
    case.v[:, :, :91] = float("nan")
    plan = RowPlan(case.positions, 200, first_keys=case.first_keys)
    assert row_attention(case.q, case.k, case.v, plan, 0.125).isfinite().all()
