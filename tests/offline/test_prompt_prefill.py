"""The KV of a prompt's chunks is full prefill's, moved to where plain KV stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import ARCHITECTURES, smollm2_tokenizer, tiny_model
from tiny_families import tiny_model as tiny_family
from torch import Tensor

from fused_kv_kernels import has_eight_bit_linears, rerotate_keys, why_not_native
from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model import KVPass, LoadedModel, StoppedError, eight_bit, eight_bit_of, load_model
from fused_kv_llm.model.attention_rule import AttentionRule
from fused_kv_llm.model.families import SUPPORTED_MODEL_TYPES
from fused_kv_llm.offline import prompt_prefill
from fused_kv_llm.offline.first_passes import AfterFirstPasses, FirstPasses
from fused_kv_llm.offline.prompt_prefill import PromptPrefill
from fused_kv_llm.prompt import Segment
from fused_kv_llm.serving import loop_of

needs_eight_bits = pytest.mark.skipif(
    why_not_native(torch.float32) is not None or not has_eight_bit_linears(), reason="no eight-bit products here"
)


HOME = 2


def never() -> bool:
    return False


def true_kv(
    prefill: PromptPrefill, ids: list[int], segments: list[Segment], known: Sequence[tuple[Segment, ChunkKV]] = ()
) -> list[ChunkKV]:
    """The KV of a prompt's chunks, kept, with keys that are moved to one position."""
    found, geometry = list[ChunkKV](), prefill._loaded.geometry
    for kv in prefill.true_kv(ids, segments, known, never):
        tables = geometry.tables(torch.tensor([HOME - kv.position]))
        keys = torch.stack([rerotate_keys(layer, table) for layer, table in zip(kv.keys, tables, strict=True)])
        found.append(ChunkKV(keys, kv.values.clone(), kv.token_ids, HOME))
    return found


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(tiny_model(), tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize("pieces", [True, False], ids=["two pieces", "one piece"])
def test_true_kv_is_what_the_model_computes(loaded: LoadedModel, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr("fused_kv_llm.offline.prompt_prefill._PIECE_TOKENS", 7)
    ids = list(range(20, 34))
    segments = [Segment(2, 6, "one"), Segment(8, 13, "two")]
    found = true_kv(PromptPrefill(loaded, loop_of(loaded.model)), ids, segments)
    with torch.inference_mode():
        layers = loaded.model(torch.tensor([ids]), use_cache=True).past_key_values.layers
    for kv, segment in zip(found, segments, strict=True):
        tables = loaded.geometry.tables(torch.tensor([segment.start - HOME]))
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
    ids = list(range(20, 34))
    first, second = Segment(3, 6, "one"), Segment(8, 13, "two")
    prefill = PromptPrefill(loaded, loop_of(loaded.model))
    one, two = true_kv(prefill, ids, [first, second])
    (behind,) = true_kv(prefill, ids, [second], [(first, one)])
    torch.testing.assert_close(behind.keys, two.keys, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(behind.values, two.values, rtol=1e-4, atol=1e-4)
    other = ChunkKV(one.keys + 1, one.values, one.token_ids, one.position)
    (changed,) = true_kv(prefill, ids, [second], [(first, other)])
    assert not torch.allclose(changed.values, two.values, rtol=1e-2, atol=1e-2)


def load(kind: str) -> LoadedModel:
    return load_model(tiny_family(kind, vocab_size=49152), tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize("kind", ["llama", "gemma4_text", "mimo_v2_flash"])
def test_what_one_prompt_leaves_in_memory_does_not_reach_the_next(kind: str) -> None:
    """Not even in the room behind the heads of layers that have smaller ones than others."""
    loaded, segment = load(kind), Segment(2, 9, "one")
    owner = loop_of(loaded.model)
    used = PromptPrefill(loaded, owner)
    true_kv(used, list(range(60, 90)), [Segment(0, 30, "other")])
    buffer = used._pool._kept[0]
    buffer.fill_(float("nan"))
    ids = list(range(20, 32))
    (got,) = true_kv(used, ids, [segment])
    assert used._pool._kept[0] is buffer
    (want,) = true_kv(PromptPrefill(loaded, owner), ids, [segment])
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)


def test_little_memory_is_kept_from_prompt_to_prompt(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_prefill, "_KEPT_BYTES", 2**17)
    prefill, kept = PromptPrefill(loaded, loop_of(loaded.model)), list[int]()
    for tokens in range(20, 400, 20):
        true_kv(prefill, list(range(20, 20 + tokens)), [Segment(2, 9, "one")])
        kept.append(prefill._pool.kept_nbytes())
    assert 0 < max(kept) <= 2**17


def test_a_prompt_that_is_stopped_or_not_finite_gives_its_memory_back(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_prefill, "_PIECE_TOKENS", 7)
    prefill, ids, segments = PromptPrefill(loaded, loop_of(loaded.model)), list(range(20, 34)), [Segment(2, 9, "one")]
    asked = iter([False])
    with pytest.raises(StoppedError):
        list(prefill.true_kv(ids, segments, (), lambda: next(asked, True)))
    assert len(prefill._pool._kept) == 1
    (plain,) = true_kv(prefill, ids, segments)
    broken = ChunkKV(plain.keys * float("inf"), plain.values, plain.token_ids, plain.position)
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        true_kv(prefill, ids, segments, [(Segment(2, 9, "other"), broken)])
    assert len(prefill._pool._kept) == 1


def test_keys_of_layers_that_rotate_differently_are_moved_by_their_own_angles() -> None:
    loaded = load("gemma3_text")
    assert len({id(table) for table in loaded.geometry.tables(torch.tensor([1]))}) > 1
    ids, segment = list(range(20, 34)), Segment(5, 9, "one")
    (got,) = true_kv(PromptPrefill(loaded, loop_of(loaded.model)), ids, [segment])
    with torch.inference_mode():
        layers = loaded.model(torch.tensor([ids]), use_cache=True).past_key_values.layers
    for keys, table, layer in zip(got.keys, loaded.geometry.tables(torch.tensor([3])), layers, strict=True):
        torch.testing.assert_close(rerotate_keys(keys, table), layer.keys[0, :, 5:9], rtol=1e-4, atol=1e-4)


FAMILIES = ["deepseek_v3", "gemma3_text", "gemma4_text", "mimo_v2_flash", "gpt_oss", "qwen3_moe"]


@needs_eight_bits
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in FAMILIES else pytest.mark.heavy) for kind in SUPPORTED_MODEL_TYPES],
)
def test_every_family_is_prefilled_with_eight_bit_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with attention in bfloat16, but for those that expand what they cache."""
    monkeypatch.setattr(eight_bit, "_LEAST_SIZE", 8)
    loaded = load(kind)
    owner, ids, segment = loop_of(loaded.model), list(range(20, 60)), Segment(8, 40, "one")
    linears = eight_bit_of(loaded, owner, never)
    (got,) = true_kv(PromptPrefill(loaded, owner, linears), ids, [segment])
    (want,) = true_kv(PromptPrefill(loaded, owner), ids, [segment])
    is_coarse = loaded.geometry.attends_cache and why_not_native() is None
    assert got.values.dtype == (torch.bfloat16 if is_coarse else torch.float32)
    for one, other in ((got.keys, want.keys), (got.values, want.values)):
        assert 0 < float((one.float() - other).norm() / other.norm()) < 0.3


@needs_eight_bits
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_with_eight_bit_layers_attention_is_in_bfloat16_where_it_is_fast(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"head_dim": 32} if architecture == "qwen3" else {}
    model = tiny_model(architecture, hidden_size=192, intermediate_size=256, **options)
    loaded = load_model(model, tokenizer=smollm2_tokenizer())
    owner, ids, segment = loop_of(model), list(range(20, 60)), Segment(8, 40, "one")
    seen, real = set[torch.dtype](), KVPass.attend

    def noting(self: KVPass, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: Any) -> Tensor:
        seen.update(part.dtype for part in (q, k, v))
        return real(self, layer_idx, q, k, v, rule)

    monkeypatch.setattr(KVPass, "attend", noting)
    coarse = PromptPrefill(loaded, owner, eight_bit_of(loaded, owner, never))
    seen.clear()
    (got,) = true_kv(coarse, ids, [segment])
    assert seen == {torch.float32 if why_not_native() else torch.bfloat16}
    seen.clear()
    (want,) = true_kv(PromptPrefill(loaded, owner), ids, [segment])
    assert seen == {torch.float32}
    for one, other in ((got.keys, want.keys), (got.values, want.values)):
        assert 0 < float((one.float() - other).norm() / other.norm()) < 0.2


@needs_eight_bits
def test_attention_is_in_eight_bits_where_the_linear_layers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(tiny_model(hidden_size=192, intermediate_size=256), tokenizer=smollm2_tokenizer())
    owner, rules = loop_of(loaded.model), list[bool]()
    linears = eight_bit_of(loaded, owner, never)

    def noting(rule: AttentionRule, *operands: Any) -> Any:
        rules.append(rule.eight_bit)
        return real(rule, *operands)

    real = AttentionRule.attention
    monkeypatch.setattr(AttentionRule, "attention", noting)
    for way in (None, linears):
        rules.clear()
        true_kv(PromptPrefill(loaded, owner, way), list(range(20, 34)), [Segment(2, 9, "one")])
        assert set(rules) == {way is not None}


@needs_eight_bits
def test_pieces_in_eight_bits_are_as_long_as_their_own_speed_allows() -> None:
    loaded = load_model(tiny_model(hidden_size=192, intermediate_size=256), tokenizer=smollm2_tokenizer())
    loop = loop_of(loaded.model)
    owner = AfterFirstPasses(loop, FirstPasses(), never)
    prefill = PromptPrefill(loaded, owner, eight_bit_of(loaded, owner, never))
    usual = loop.piece_tokens(1 << 40)
    true_kv(prefill, list(range(20, 34)), [Segment(2, 9, "one")])
    assert prefill._speed is not None
    assert prefill._speed.token_s is not None
    assert loop.piece_tokens(1 << 40) == usual, "theirs says nothing about others"
    prefill._speed.token_s = 0.05
    assert owner.piece_tokens(1024, prefill._speed) == 10


@needs_eight_bits
def test_pieces_in_eight_bits_do_not_teach_how_long_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(tiny_model(hidden_size=192, intermediate_size=256), tokenizer=smollm2_tokenizer())
    owner, measured = loop_of(loaded.model), list[int]()
    linears, real = eight_bit_of(loaded, owner, never), owner.run

    def noting(work: Any, tokens: int = 0, stopped: Any = None) -> Any:
        measured.append(tokens)
        return real(work, tokens, stopped)

    monkeypatch.setattr(owner, "run", noting)
    for way in (None, linears):
        true_kv(PromptPrefill(loaded, owner, way), list(range(20, 34)), [Segment(2, 9, "one")])
    assert measured == [14, 0]
