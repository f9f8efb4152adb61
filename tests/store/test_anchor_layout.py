"""Which tensors the sidecar with a chunk's anchors has: those of another chunk or model, or of nothing, do not fit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fused_kv_llm.store import AnchorKV, AnchorLayout

LAYERS, TOKENS, ROOM = (1, 2, 4), 12, (2, 16, 10)
LAYOUT = AnchorLayout(LAYERS, torch.bfloat16, TOKENS, ROOM)
STORAGES = ("auto", "int8", "int4")


def side(storage: str) -> dict[str, Tensor]:
    heads, *dims = ROOM
    keys, values = (torch.ones(6, heads, TOKENS, dim, dtype=torch.bfloat16) for dim in dims)
    return AnchorKV.chosen(torch.arange(0, TOKENS, 3), keys, values, LAYERS).tensors(LAYERS, storage)


NAMES = [(storage, name) for storage in STORAGES for name in side(storage)]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "fewer layers or places": lambda old: old[1:],
    "another axis": lambda old: old[None],
    "nothing along the last axis": lambda old: old[..., :0],
    "a single number": lambda old: old.flatten()[0],
    "another dtype": lambda old: old.float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("storage", "name"), NAMES, ids=str)
def test_a_tensor_of_another_form_does_not_fit(storage: str, name: str, change: str) -> None:
    tensors = side(storage)
    assert LAYOUT.fits(tensors)
    assert not LAYOUT.fits({**tensors, name: CHANGES[change](tensors[name])})
    assert not LAYOUT.fits({other: part for other, part in tensors.items() if other != name})
    assert not LAYOUT.fits({**tensors, "more": tensors[name]})


@pytest.mark.parametrize("positions", [[0, 3, 9, 6], [0, 3, 3, 6], [-1, 3, 6, 9], [0, 3, 6, TOKENS]])
def test_positions_are_ascending_places_in_the_chunk(positions: list[int]) -> None:
    tensors = side("int4")
    assert LAYOUT.fits(tensors)
    assert not LAYOUT.fits({**tensors, "positions": torch.tensor(positions, dtype=torch.int32)})


@pytest.mark.parametrize(
    "other",
    [
        AnchorLayout((1, 2), torch.bfloat16, TOKENS, ROOM),
        AnchorLayout((1, 2, 5), torch.bfloat16, TOKENS, ROOM),
        AnchorLayout(LAYERS, torch.float32, TOKENS, ROOM),
        AnchorLayout(LAYERS, torch.bfloat16, TOKENS + 1, ROOM),
        AnchorLayout(LAYERS, torch.bfloat16, TOKENS, (1, 16, 10)),
        AnchorLayout(LAYERS, torch.bfloat16, TOKENS, (2, 8, 10)),
        AnchorLayout(LAYERS, torch.bfloat16, TOKENS, (2, 16, 16)),
    ],
)
def test_those_of_another_chunk_or_model_do_not_fit(other: AnchorLayout) -> None:
    assert LAYOUT.fits(side("auto"))
    assert not other.fits(side("auto"))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_side_file_without_anchors_fits(storage: str) -> None:
    """The first layer alone scores, so there is nothing below it."""
    keys, values = (torch.ones(1, 2, TOKENS, dim, dtype=torch.bfloat16) for dim in ROOM[1:])
    tensors = AnchorKV.chosen(torch.arange(3), keys, values, (0,)).tensors((0,), storage)
    assert AnchorLayout((0,), torch.bfloat16, TOKENS, ROOM).fits(tensors)
