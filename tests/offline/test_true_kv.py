"""The KV of a prompt's chunks is full prefill's, moved to where plain KV stands."""

from __future__ import annotations

import pytest
import torch
from models import smollm2_tokenizer, tiny_model

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import LoadedModel, load_model
from fused_kv_llm.offline.true_kv import true_kv
from fused_kv_llm.prompt import Segment
from fused_kv_llm.serving import loop_of


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(tiny_model(), tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize("pieces", [True, False], ids=["two pieces", "one piece"])
def test_true_kv_is_what_the_model_computes(loaded: LoadedModel, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr("fused_kv_llm.offline.true_kv._PIECE_TOKENS", 7)
    ids, home = list(range(20, 34)), 2
    segments = [Segment(2, 6, "one"), Segment(8, 13, "two")]
    found = true_kv(loaded, loop_of(loaded.model), ids, segments, home, (), lambda: False)
    with torch.inference_mode():
        layers = loaded.model(torch.tensor([ids]), use_cache=True).past_key_values.layers
    for kv, segment in zip(found, segments, strict=True):
        tables = loaded.geometry.tables(torch.tensor([segment.start - home]))
        assert kv.token_ids == tuple(ids[segment.start : segment.stop])
        for number, layer in enumerate(layers):
            place = slice(segment.start, segment.stop)
            torch.testing.assert_close(
                rerotate_keys(kv.keys[number], tables[number]), layer.keys[0, :, place], rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(kv.values[number], layer.values[0, :, place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pieces", [2, 7, 1024])
def test_known_chunks_stand_where_they_are_put_and_are_not_computed(
    loaded: LoadedModel, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the KV that full prefill has there, from wherever, all others are full prefill's."""
    monkeypatch.setattr("fused_kv_llm.offline.true_kv._PIECE_TOKENS", pieces)
    ids, home = list(range(20, 34)), 2
    first, second = Segment(3, 6, "one"), Segment(8, 13, "two")
    owner = loop_of(loaded.model)
    one, two = true_kv(loaded, owner, ids, [first, second], home, (), lambda: False)
    (behind,) = true_kv(loaded, owner, ids, [second], home, [(first, one)], lambda: False)
    torch.testing.assert_close(behind.keys, two.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind.values, two.values, rtol=1e-4, atol=1e-4)
    other = ChunkKV(one.keys + 1, one.values, one.token_ids, one.position)
    (changed,) = true_kv(loaded, owner, ids, [second], home, [(first, other)], lambda: False)
    assert not torch.allclose(changed.values, two.values, rtol=1e-2, atol=1e-2)
