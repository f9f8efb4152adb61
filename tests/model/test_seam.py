"""What could make answers silently wrong: each is an error that says which layer, or what was asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import smollm2_tokenizer, tiny_model
from tiny_families import tiny_model as tiny_family
from torch.nn.functional import scaled_dot_product_attention

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, FusedKVWarning, ModelChangedError, UnsupportedModelError
from fused_kv_llm.model import (
    CachePool,
    ForwardPass,
    FusedCache,
    LoadedModel,
    PackedChunk,
    compute_prefix,
    families,
    forward_rows,
    load_model,
    prefill_packed,
)  # fmt: skip
from fused_kv_llm.model.attention import rule_of
from fused_kv_llm.model.mask import CAUSAL


def engine_of(model: Any, folder: Path) -> FusedKVEngine:
    return FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=folder, preprocessing="none", store_misses=False)


def own_attention(module: Any, hidden_states: torch.Tensor, position_embeddings: Any, past_key_values: Any = None,
                  **_: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as a user might patch it in: right by itself, past the registered function."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return module.o_proj(attended.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_that_was_patched_is_an_error(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model().to(dtype)
    before = model.model.layers[1].self_attn
    before.forward = own_attention.__get__(before)
    with pytest.raises(UnsupportedModelError, match="Layer 1 of the model does not attend through the engine"):
        engine_of(model, tmp_path)
    loaded = load_model(tiny_model().to(dtype), tokenizer=smollm2_tokenizer())
    attention = loaded.model.model.layers[2].self_attn
    attention.forward = own_attention.__get__(attention)
    with pytest.raises(UnsupportedModelError, match="Layer 2 of the model does not attend through the engine"):
        run(loaded)


def test_keys_that_are_kept_elsewhere_are_an_error() -> None:
    """A layer that attends through the seam, but not to what the cache holds, would see nothing that is stored."""
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    attention = loaded.model.model.layers[1].self_attn
    own = type(attention).forward
    attention.forward = lambda *args, **kwargs: own(attention, *args, **{**kwargs, "past_key_values": None})
    with pytest.raises(UnsupportedModelError, match="Layer 1 of the model does not attend through the engine"):
        run(loaded)


def test_a_model_that_looks_at_more_than_attention_shows_is_refused() -> None:
    model = tiny_model()

    def mixed(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 4 * output.mean(dim=1, keepdim=True)

    model.model.layers[1].mlp.register_forward_hook(mixed)
    with pytest.raises(UnsupportedModelError, match="recomputed rows give other logits"):
        load_model(model, tokenizer=smollm2_tokenizer())


def test_keys_that_no_rotation_moves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm behind the rotation, with weights that differ by dimension."""
    model = tiny_family("hunyuan_v1_dense")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.key_layernorm.weight.uniform_(0.2, 3.0)
    monkeypatch.delitem(families.REFUSED, "hunyuan_v1_dense")
    with pytest.warns(FusedKVWarning, match="hunyuan"), pytest.raises(UnsupportedModelError, match="KV of layer 0"):
        load_model(model, tokenizer=smollm2_tokenizer(), trust_probe=True)


def run(loaded: LoadedModel) -> torch.Tensor:
    """Return the logits of a pass below the engine, which refuses changed models before it runs them."""
    rows = torch.arange(6)
    cache = FusedCache(loaded.geometry, 6, CachePool(loaded.dtype, loaded.device))
    with torch.inference_mode():
        return forward_rows(loaded, rows[None], rows, cache, ForwardPass(rows, 6))


def test_a_model_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is_causal=False"):
        load_model(model, tokenizer=smollm2_tokenizer())
    live = tiny_model()
    with engine_of(live, tmp_path) as engine:
        live.config.is_causal = False
        with pytest.raises(UnsupportedModelError, match="is_causal=False"):
            engine.generate("How many?", max_tokens=2)


def test_values_that_are_not_numbers_name_the_layer() -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    loaded.model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="not numbers, from layer 1"):
        run(loaded)
    with pytest.raises(UnsupportedModelError, match="not numbers, from layer 1"):
        prefill_packed(loaded, [PackedChunk((5, 6, 7))], compute_prefix(loaded, ()))
    with pytest.raises(UnsupportedModelError, match="not numbers, from layer 1"):
        load_model(loaded.model, tokenizer=smollm2_tokenizer())


def test_a_head_that_gives_no_number_is_an_error() -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    loaded.model.lm_head.weight.data[7] = float("nan")
    with pytest.raises(UnsupportedModelError, match="from its output"):
        run(loaded)


class _Module:
    is_causal = True


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"something_new": 3}, "something_new"),
    ],
    ids=["position_bias", "dropout", "is_causal", "something_new"],
)
def test_what_attention_is_asked_for_is_done_or_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        rule_of(_Module(), CAUSAL, None, 16, **options)
    rule = rule_of(_Module(), CAUSAL, None, 16, sliding_window=4, softcap=30.0, position_bias=None)
    assert (rule.scale, rule.softcap) == (0.25, 30.0)


@pytest.mark.parametrize(("kind", "implementation"), [("gemma2", "eager"), ("llama", "sdpa"), ("gpt_oss", "eager")])
def test_a_users_own_forward_runs_what_it_ran_before(kind: str, implementation: str) -> None:
    model = tiny_family(kind)
    model.set_attn_implementation(implementation)
    ids = torch.arange(1, 60)[None]
    with torch.inference_mode():
        want = copy.deepcopy(model)(ids).logits
        load_model(model, tokenizer=smollm2_tokenizer())
        assert torch.equal(model(ids).logits, want)
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, want)


def _window(model: Any) -> None:
    model.config.sliding_window = 8


def _layer_types(model: Any) -> None:
    model.config.layer_types = ["full_attention"] * 4


def _frequencies(model: Any) -> None:
    model.model.rotary_emb.full_attention_inv_freq.mul_(0.5)


def _scale(model: Any) -> None:
    model.model.embed_tokens.embed_scale.mul_(2)


@pytest.mark.parametrize("change", [_window, _layer_types, _frequencies, _scale])
def test_a_configuration_or_a_buffer_that_changes_under_an_engine_is_an_error(change: Any, tmp_path: Path) -> None:
    model = tiny_family("gemma3_text")
    with engine_of(model, tmp_path) as engine:
        engine.generate("How many?", max_tokens=1)
        change(model)
        with pytest.raises(ModelChangedError):
            engine.generate("How many?", max_tokens=1)


def test_the_implementation_that_was_attached_is_the_one_to_set_back(tmp_path: Path) -> None:
    model = tiny_family("gpt_oss")
    model.set_attn_implementation("eager")
    with engine_of(model, tmp_path) as engine:
        for other in ("eager", "fused_kv"):
            model.set_attn_implementation(other)
            with pytest.raises(ConfigError, match="fused_kv_over_eager"):
                engine.generate("How many?", max_tokens=1)
        model.set_attn_implementation("fused_kv_over_eager")
        engine.generate("How many?", max_tokens=1)


def test_weights_whose_changes_leave_no_trace_are_refused() -> None:
    with torch.inference_mode():
        model = tiny_model()
    with pytest.raises(ConfigError, match="inference_mode"):
        load_model(model, tokenizer=smollm2_tokenizer())


def test_a_tokenizer_with_ids_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the model has 64 embeddings"):
        engine_of(tiny_family("llama", vocab_size=64), tmp_path)
