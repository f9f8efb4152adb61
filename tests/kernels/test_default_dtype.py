"""What torch makes where no dtype is named decides nothing: a library that loads a model meanwhile sets it for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fused_kv_kernels import compress_rows, float_linear, quantize_rows, residual_norm, token_scores

DTYPES = [torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def _default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


CALLS: dict[str, Callable[[torch.dtype], Any]] = {
    "compress_rows": lambda dtype: compress_rows(_drawn(9, 64).to(dtype)),
    "float_linear": lambda dtype: float_linear(_drawn(9, 64).to(dtype), (_drawn(96, 64).to(dtype), None)),
    "quantize_rows": lambda dtype: quantize_rows(_drawn(9, 64).to(dtype), torch.ones(64, dtype=torch.float32)),
    "residual_norm": lambda dtype: residual_norm(_drawn(9, 64), _drawn(64).to(dtype), 1e-5),
    "token_scores": lambda dtype: token_scores(
        *(_drawn(1, 2, 40, 64).to(dtype) for _ in "qk"), torch.arange(40), 0.125
    ),
}


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_default_dtype_changes_nothing(name: str, of: torch.dtype) -> None:
    want = _tensors(CALLS[name](of))
    for default in DTYPES:
        torch.set_default_dtype(default)
        got = _tensors(CALLS[name](of))
        assert [one.dtype for one in got] == [one.dtype for one in want]
        assert all(map(torch.equal, got, want))
