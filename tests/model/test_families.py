"""Every verified type, as a tiny random model: fused passes equal plain transformers, and the refused say why."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer
from tiny_families import seeing_config, settings_of, tiny_model
from torch import Tensor
from transformers import AutoModelForImageTextToText

from fused_kv_kernels import rerotate_keys, why_not_native
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import UnsupportedModelError
from fused_kv_llm.model import (
    AttentionRule,
    BatchCache,
    CachePool,
    ForwardPass,
    FusedCache,
    LoadedModel,
    NarrowingPass,
    PackedChunk,
    compute_prefix,
    forward_rows,
    load_model,
    prefill_packed,
)  # fmt: skip
from fused_kv_llm.model.deviation import deviation, tolerance
from fused_kv_llm.model.families import REFUSED, SUPPORTED_MODEL_TYPES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCABULARY = 1024
IDS = [(7919 * number) % VOCABULARY for number in range(1, 81)]


@cache
def loaded_model(kind: str, dtype: str) -> LoadedModel:
    if (kind, dtype) == ("gemma4_text", "bfloat16") and (lacks := why_not_native()) is not None:
        # torch rounds this model's bfloat16 more coarsely there than the check of new models allows for.
        pytest.skip(f"this model is refused in bfloat16 without native operators: {lacks}")
    return load_model(tiny_model(kind, vocab_size=VOCABULARY).to(DTYPES[dtype]), tokenizer=smollm2_tokenizer())


def plain_logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Return the logits ``[len(ids), vocabulary]`` of the model's own forward, through the implementation it had."""
    with torch.inference_mode():
        return loaded.model(torch.tensor([ids]), use_cache=False).logits[0].float()


def close(got: Tensor, want: Tensor, dtype: str) -> None:
    """Compare logits: to 1e-4 in float32; in bfloat16 as far as rounding goes, which may send a token elsewhere."""
    if dtype == "float32":
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        return
    gap = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(gap.median()) < 0.1


def fill(loaded: LoadedModel, ids: list[int]) -> FusedCache:
    cache = FusedCache(loaded.geometry, len(ids), CachePool(loaded.dtype, loaded.device))
    positions = torch.arange(len(ids))
    with torch.inference_mode():
        forward_rows(loaded, torch.tensor([ids]), positions, cache, ForwardPass(positions, len(ids)))
    return cache


class _Leaving(NarrowingPass):
    """Rows leave behind the first layer and behind the second."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        if layer_idx == 0:
            self.keep(torch.tensor([0, 1, 2, 5, 8]))
        if layer_idx == 1:
            self.keep(torch.tensor([0, 2, 4]))
        return super().attend(layer_idx, q, k, v, rule)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SUPPORTED_MODEL_TYPES)
class TestTypes:
    """What has to hold for each of them."""

    def test_all_rows_are_full_prefill(self, kind: str, dtype: str) -> None:
        loaded = loaded_model(kind, dtype)
        cache, positions = fill(loaded, IDS), torch.arange(len(IDS))
        with torch.inference_mode():
            got = forward_rows(loaded, torch.tensor([IDS]), positions, cache, ForwardPass(positions, len(IDS)))
        want = plain_logits(loaded, IDS)
        close(got, want, dtype)
        if dtype == "float32":
            assert torch.equal(got.argmax(-1), want.argmax(-1))
        assert loaded.snapshot.changes() == [], "a forward changes nothing that is watched"

    def test_scattered_rows_equal_the_plain_forward(self, kind: str, dtype: str) -> None:
        """Windows of 32 tokens begin and end between them."""
        loaded = loaded_model(kind, dtype)
        cache, rows = fill(loaded, IDS), torch.tensor([3, 4, 20, 31, 32, 33, 50, 64, 79])
        # In bfloat16 one row says little: rounding may send its token to another expert.
        last = loaded.geometry.last_layer if dtype == "float32" else None
        with torch.inference_mode():
            fused = ForwardPass(rows, len(IDS), final_layer=last)
            got = forward_rows(loaded, torch.tensor([IDS])[:, rows], rows, cache, fused)
        close(got, plain_logits(loaded, IDS)[rows[-got.shape[0] :]], dtype)

    def test_a_chunk_in_its_place_is_exact(self, kind: str, dtype: str) -> None:
        """A prefix, a stored chunk of it and a question, at ratio 0."""
        loaded = loaded_model(kind, dtype)
        prefix, chunk, question = IDS[:6], IDS[6:70], IDS[70:]
        kv = self._stored(loaded, prefix, [chunk])[0]
        cache = FusedCache(loaded.geometry, len(IDS), CachePool(loaded.dtype, loaded.device))
        before = compute_prefix(loaded, tuple(prefix))
        with torch.inference_mode():
            for part, own in ((cache.keys, kv.keys), (cache.values, kv.values)):
                part[:, 0, :, 6:70] = own
            cache.keys[:, 0, :, :6], cache.values[:, 0, :, :6] = before.keys, before.values
            rows = torch.arange(70, len(IDS))
            got = forward_rows(loaded, torch.tensor([question]), rows, cache, ForwardPass(rows, len(IDS)))
        close(got, plain_logits(loaded, IDS)[70:], dtype)

    def test_a_batch_equals_singles(self, kind: str, dtype: str) -> None:
        loaded = loaded_model(kind, dtype)
        chunks = [IDS[6:50], IDS[50:57], IDS[20:60]]
        together = self._stored(loaded, IDS[:6], chunks)
        for chunk, kv in zip(chunks, together, strict=True):
            alone = self._stored(loaded, IDS[:6], [chunk])[0]
            close(kv.keys.float().flatten(), alone.keys.float().flatten(), dtype)
            close(kv.values.float().flatten(), alone.values.float().flatten(), dtype)

    def test_rotation_composes(self, kind: str, dtype: str) -> None:
        """Moved twice, keys are those of the other place; behind the first layer, as far as rounding goes."""
        loaded, delta = loaded_model(kind, dtype), 700
        geometry, ids = loaded.geometry, torch.tensor([IDS[:20]])
        found = []
        for start in (0, delta):
            cache = BatchCache(geometry.num_layers, geometry.room, swaps=geometry.swaps)
            positions = torch.arange(start, start + 20)
            with torch.inference_mode():
                forward_rows(loaded, ids, positions, cache, ForwardPass(torch.arange(20), 20))
            found.append(cache.chunk(0, slice(0, 20)))
        one, other = (geometry.tables(torch.full((20,), part)) for part in (300, 400))
        for layer, table in enumerate(one):
            moved = rerotate_keys(rerotate_keys(found[0][0][layer], table), other[layer])
            want = found[1][0][layer].float()
            limit = 1e-3 if dtype == "float32" else (tolerance(loaded.dtype) if layer else 0.05)
            assert float(deviation(*(x.transpose(0, 1).flatten(1) for x in (moved, want)))) < limit, f"layer {layer}"

    @staticmethod
    def _stored(loaded: LoadedModel, prefix: list[int], chunks: list[list[int]]) -> list[Any]:
        return prefill_packed(
            loaded, [PackedChunk(tuple(ids)) for ids in chunks], compute_prefix(loaded, tuple(prefix))
        )


@pytest.mark.parametrize("kind", SUPPORTED_MODEL_TYPES)
def test_rows_that_leave_change_nothing_for_those_that_stay(kind: str) -> None:
    """With exact KV in place, the others see the same whether a row goes on or not."""
    loaded = loaded_model(kind, "float32")
    cache, rows = fill(loaded, IDS), torch.tensor([3, 4, 20, 31, 32, 33, 50, 64, 79])
    with torch.inference_mode():
        leaving = _Leaving(rows, len(IDS), (), loaded.geometry.last_layer)
        got = forward_rows(loaded, torch.tensor([IDS])[:, rows], rows, cache, leaving)
    assert leaving.rows.tolist() == [3, 20, 79]
    close(got, plain_logits(loaded, IDS)[-1:], "float32")


@pytest.mark.parametrize(
    "kind",
    ["gemma3_text", "deepseek_v3", "cohere2", "gpt_oss", "qwen3_moe", "gemma3n_text", "gemma4_text", "mimo_v2_flash"],
)
def test_the_engine_answers_as_transformers_does_at_ratio_one(kind: str, tmp_path: Path) -> None:
    """Through everything: ingestion with preprocessing, planning, loading, selection."""
    model = tiny_model(kind)
    with FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, store_misses=False) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False, preprocess="wait")
        prompt = rag_prompt(SHORT[:5])
        fused, report = engine.prefill(prompt, recompute_ratio=1.0)
        assert report.chunks_found == 5
        with torch.inference_mode():
            want = engine.model(torch.tensor([engine.encode(prompt)]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(fused.logits, want, atol=1e-4, rtol=1e-4)
        gaps = []
        for ratio, selector in ((0.0, "full_reuse"), (0.3, "all_layers"), (0.9, "sink_attention")):
            partly, _ = engine.prefill(prompt, recompute_ratio=ratio, selector=selector)
            gaps.append(torch.nn.functional.kl_div(partly.logits.log_softmax(-1), want.log_softmax(-1), log_target=True,
                                                   reduction="sum"))  # fmt: skip
        assert gaps[2] < gaps[0]


def test_the_list_is_long_enough_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\nverified types ({len(SUPPORTED_MODEL_TYPES)}): {', '.join(SUPPORTED_MODEL_TYPES)}")
    assert len(SUPPORTED_MODEL_TYPES) >= 60


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "opt"])
def test_learned_positions_are_refused_with_the_reason(kind: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 99,
             "num_hidden_layers": 1, "ffn_dim": 16, "word_embed_proj_dim": 16}  # fmt: skip
    known = CONFIG_MAPPING[kind]().to_dict()
    config = CONFIG_MAPPING[kind](**{name: value for name, value in small.items() if name in known})
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="positions are learned or added"):
        load_model(model, tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize(
    ("kind", "text"),
    [("llava", "llama"), ("mistral3", "mistral"), ("aya_vision", "cohere2"), ("gemma4", "gemma4_text")],
)
def test_of_models_that_see_images_the_text_model_is_used(kind: str, text: str, tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_config(seeing_config(kind, text, vocab_size=VOCABULARY)).eval()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, tokenizer=smollm2_tokenizer(), dtype="float32")
    cache, rows = fill(loaded, IDS), torch.tensor([3, 31, 33, 79])
    with torch.inference_mode():
        fused = ForwardPass(rows, len(IDS))
        got = forward_rows(loaded, torch.tensor([IDS])[:, rows], rows, cache, fused)
        want = model(torch.tensor([IDS]), use_cache=False).logits[0, rows]
    close(got, want, "float32")


def test_queries_scaled_by_position_are_those_of_their_own_rows() -> None:
    """Ministral 3 scales them behind the original context: rows would be right there, moved chunks would not."""
    rope = {**settings_of("ministral3")["rope_parameters"], "original_max_position_embeddings": 32}
    model = tiny_model("ministral3", vocab_size=VOCABULARY, rope_parameters=rope)
    loaded = load_model(model, tokenizer=smollm2_tokenizer())
    assert loaded.geometry.context_length == 32
    cache, rows = fill(loaded, IDS), torch.tensor([3, 31, 32, 63, 64, 79])
    with torch.inference_mode():
        got = forward_rows(loaded, torch.tensor([IDS])[:, rows], rows, cache, ForwardPass(rows, len(IDS)))
    close(got, plain_logits(loaded, IDS)[rows], "float32")
    loaded.model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    assert (plain_logits(loaded, IDS)[rows] - got).abs().amax(-1)[2:].min() > 1e-3, "the scale shows"


def test_a_type_that_may_keep_a_state_is_refused_if_a_layer_does() -> None:
    model = tiny_model("granitemoehybrid", vocab_size=VOCABULARY)
    model.config.layer_types = ["linear_attention", *model.config.layer_types[1:]]
    with pytest.raises(UnsupportedModelError, match="'linear_attention', is not supported: some of its layers keep"):
        load_model(model, tokenizer=smollm2_tokenizer())


def test_no_type_is_on_both_lists() -> None:
    assert not set(SUPPORTED_MODEL_TYPES) & REFUSED.keys()


def test_a_type_on_neither_list_needs_to_be_asked_for() -> None:
    model = tiny_model("llama")
    model.config.model_type = "somebodys_llama"
    with pytest.raises(UnsupportedModelError, match=r"'somebodys_llama' has not been verified.*trust_probe=True"):
        load_model(copy.deepcopy(model), tokenizer=smollm2_tokenizer())
    with pytest.warns(UserWarning, match="somebodys_llama"):
        loaded = load_model(model, tokenizer=smollm2_tokenizer(), trust_probe=True)
    assert loaded.geometry.num_layers == 4


def test_the_tables_of_the_docs_are_the_lists() -> None:
    docs = Path(__file__).parents[2] / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(docs))
        import model_types
        import options

    page = (docs / "models.md").read_text(encoding="utf-8")
    assert page == options.page_with(model_types.table(), page, model_types.BEGIN), "run python docs/model_types.py"
