"""Masks by true position: what rows see of scattered keys, against the mask function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model.mask import CAUSAL, MaskRule

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@given(data=st.data(), size=st.integers(1, 40), is_window=st.booleans())
def test_the_first_key_is_that_of_the_mask_function(data: st.DataObject, size: int, is_window: bool) -> None:
    keys = torch.tensor(sorted(data.draw(st.sets(st.integers(0, 120), min_size=1, max_size=60))))
    own = torch.tensor(sorted(data.draw(st.sets(st.integers(0, len(keys) - 1), min_size=1))))
    function = (
        sliding_window_causal_mask_function(size) if is_window else chunked_causal_mask_function(size, NO_PADDING)
    )
    first = MaskRule(function).first_keys(keys[own], keys, own)
    for number, row in enumerate(own.tolist()):
        seen = [key for key in range(len(keys)) if bool(function(0, 0, keys[row], keys[key]))]
        assert seen == list(range(0 if first is None else int(first[number]), row + 1))


def test_a_causal_mask_hides_nothing() -> None:
    rows = torch.arange(5)
    assert CAUSAL.first_keys(rows, rows, rows) is None
    assert not CAUSAL.hides_from(1000)
    window = MaskRule(sliding_window_causal_mask_function(100))
    assert window.hides_from(101)
    assert not window.hides_from(100)


def _sees_the_next(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= row + 1


def _is_blind(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key < row


@pytest.mark.parametrize("function", [_sees_the_next, _is_blind])
def test_masks_that_are_not_causal_are_refused(function: Callable[..., Any]) -> None:
    rows = torch.arange(4)
    with pytest.raises(UnsupportedModelError, match="its attention is not causal"):
        MaskRule(function).first_keys(rows, rows, rows)


def test_masks_with_holes_are_refused() -> None:
    def every_other(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return causal_mask_function(batch, head, row, key) & ((row - key) % 2 == 0)

    with pytest.raises(UnsupportedModelError, match="hides keys between"):
        MaskRule(every_other).hides_from(64)
