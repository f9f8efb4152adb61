"""Layers that score a context in models some of whose layers have a window."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fused_kv_llm.online.selection import global_layers

GEMMA = (5, 11, 17)


@pytest.mark.parametrize(
    ("layers", "without_window", "wanted"),
    [
        ((4, 5, 6), (), (4, 5, 6)),
        ((), GEMMA, ()),
        ((5, 6, 11, 12, 17), GEMMA, GEMMA),
        ((5, 11, 17), (5, 11, 17, 23, 29), (5, 11, 17)),
        (range(4, 10), GEMMA, (5, 11)),
        (range(9, 14), GEMMA, (5, 11)),
        (range(13, 20), (5, 11, 17, 23), (11, 17)),
        ((7, 8, 9, 10), GEMMA, (5, 11)),
        ((11, 12, 13, 14), (5, 11, 17, 23), (5, 11)),
        (range(4, 10), (5,), (5,)),
        ((17,), GEMMA, (17,)),
        ((16,), GEMMA, (17,)),
        ((14,), GEMMA, (11,)),
    ],
    ids=[
        "no windows",
        "nothing",
        "all",
        "three of five",
        "one",
        "one of three",
        "one of four",
        "none",
        "a tie: the earlier",
        "the model has one",
        "single",
        "single, none",
        "single, a tie: the earlier",
    ],
)
def test_two_layers_without_a_window_score_where_several_are_wanted(
    layers: Sequence[int], without_window: Sequence[int], wanted: tuple[int, ...]
) -> None:
    assert global_layers(layers, without_window) == wanted
