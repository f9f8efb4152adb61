"""The KV of a prompt's chunks is full prefill's, moved to where plain KV stands."""

from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, smollm2_tokenizer, tiny_model

from fused_kv_kernels import has_eight_bit_linears, rerotate_keys, why_not_native
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.model import LoadedModel, eight_bit_of, load_model
from fused_kv_llm.offline.prompt_prefill import PromptPrefill
from fused_kv_llm.prompt import Segment
from fused_kv_llm.serving import loop_of


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(tiny_model(), tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize("pieces", [True, False], ids=["two pieces", "one piece"])
def test_true_kv_is_what_the_model_computes(loaded: LoadedModel, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr("fused_kv_llm.offline.prompt_prefill._PIECE_TOKENS", 7)
    ids, home = list(range(20, 34)), 2
    segments = [Segment(2, 6, "one"), Segment(8, 13, "two")]
    found = PromptPrefill(loaded, loop_of(loaded.model)).true_kv(ids, segments, home, (), lambda: False)
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
    monkeypatch.setattr("fused_kv_llm.offline.prompt_prefill._PIECE_TOKENS", pieces)
    ids, home = list(range(20, 34)), 2
    first, second = Segment(3, 6, "one"), Segment(8, 13, "two")
    prefill = PromptPrefill(loaded, loop_of(loaded.model))
    one, two = prefill.true_kv(ids, [first, second], home, (), lambda: False)
    (behind,) = prefill.true_kv(ids, [second], home, [(first, one)], lambda: False)
    torch.testing.assert_close(behind.keys, two.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind.values, two.values, rtol=1e-4, atol=1e-4)
    other = ChunkKV(one.keys + 1, one.values, one.token_ids, one.position)
    (changed,) = prefill.true_kv(ids, [second], home, [(first, other)], lambda: False)
    assert not torch.allclose(changed.values, two.values, rtol=1e-2, atol=1e-2)


def test_what_one_prompt_leaves_in_memory_does_not_reach_the_next(loaded: LoadedModel) -> None:
    owner, segment = loop_of(loaded.model), Segment(2, 9, "one")
    used = PromptPrefill(loaded, owner)
    used.true_kv(list(range(60, 90)), [Segment(0, 30, "other")], 2, (), lambda: False)
    buffer = used._pool._kept[0]
    buffer.fill_(float("nan"))
    ids = list(range(20, 32))
    (got,) = used.true_kv(ids, [segment], 2, (), lambda: False)
    assert used._pool._kept[0] is buffer
    (want,) = PromptPrefill(loaded, owner).true_kv(ids, [segment], 2, (), lambda: False)
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)


@pytest.mark.skipif(
    why_not_native(torch.float32) is not None or not has_eight_bit_linears(), reason="no eight-bit products here"
)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_with_eight_bit_layers_attention_is_in_bfloat16_where_it_is_fast(architecture: str) -> None:
    options = {"head_dim": 32} if architecture == "qwen3" else {}
    model = tiny_model(architecture, hidden_size=192, intermediate_size=256, **options)
    loaded = load_model(model, tokenizer=smollm2_tokenizer())
    owner, ids, segment = loop_of(model), list(range(20, 60)), Segment(8, 40, "one")
    coarse = PromptPrefill(loaded, owner, eight_bit_of(loaded, owner, lambda: False))
    (got,) = coarse.true_kv(ids, [segment], 2, (), lambda: False)
    (want,) = PromptPrefill(loaded, owner).true_kv(ids, [segment], 2, (), lambda: False)
    assert got.values.dtype == (torch.float32 if why_not_native() else torch.bfloat16)
    for one, other in ((got.keys, want.keys), (got.values, want.values)):
        assert 0 < float((one.float() - other).norm() / other.norm()) < 0.2
