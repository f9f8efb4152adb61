"""The key that a layer's queries agree about scores the same with all of them, and works like a bias."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from corpus import SHORT
from models import smollm2_tokenizer
from real_models import gemma
from tiny_families import tiny_model as tiny_family
from torch import Tensor

from fused_kv_kernels import rerotate_keys
from fused_kv_llm.model import (
    AttentionRule,
    CachePool,
    FusedCache,
    KVPass,
    LoadedModel,
    StoppedError,
    common_key,
    common_keys,
    forward_kv,
    load_model,
)
from fused_kv_llm.serving import loop_of


def common_of(loaded: LoadedModel) -> Tensor:
    return common_keys(loaded, loop_of(loaded.model), lambda: False)


@cache
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m", dtype="float32", device="cpu")


class _Noting(KVPass):
    """Keeps what every layer attends with."""

    def __init__(self, rows: Tensor, last_layer: int) -> None:
        super().__init__(rows, len(rows), last_layer)
        self.noted: list[tuple[Tensor, Tensor, float]] = []

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        self.noted.append((q[0].float(), k[0].float(), rule.scale))
        return super().attend(layer_idx, q, k, v, rule)


def attention_of(loaded: LoadedModel, text: str) -> list[tuple[Tensor, Tensor, float]]:
    """Return queries ``[Hq, N, D]``, keys ``[Hkv, N, D]`` and scale of every layer."""
    ids = loaded.tokenizer(text)["input_ids"]
    rows = torch.arange(len(ids))
    cache = FusedCache(loaded.geometry, len(ids), CachePool(loaded.dtype, loaded.device, max_bytes=0))
    forward_pass = _Noting(rows, loaded.geometry.num_layers - 1)
    with torch.inference_mode():
        forward_kv(loaded, torch.tensor([ids]), rows, cache, forward_pass)
    return [(q, k.clone(), scale) for q, k, scale in forward_pass.noted]


def placed(loaded: LoadedModel, common: Tensor, places: Tensor) -> list[Tensor]:
    """Return what is common to a layer's queries as a key at some places, ``[Hkv, N, D]``."""
    tables = loaded.geometry.tables(places)
    return [
        rerotate_keys(layer[:, None].expand(-1, len(places), -1), table)
        for layer, table in zip(common, tables, strict=True)
    ]


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_it_scores_the_same_with_all_queries_of_another_text(name: str) -> None:
    """At any place up to 600 tokens before them, and not in the first layer."""
    loaded = smollm2() if name == "smollm2" else gemma()
    common, text = common_of(loaded), "\n\n".join(SHORT)
    assert not common[0].any()
    some = common.norm(dim=-1) > 0
    assert float(some[1:].float().mean()) > 0.8
    for layer, (q, k, scale) in enumerate(attention_of(loaded, text)):
        places = torch.tensor([20, 60, 100])
        ours = placed(loaded, common, places)[layer]
        by_head = q[:, 150:600].reshape(k.shape[0], -1, q.shape[2])
        scores = scale * torch.einsum("hnd,htd->hnt", by_head, ours)[some[layer]]
        if len(scores):
            assert 0.7 < float(scores.mean()) < 1.3
            assert float(scores.std()) < 0.5 * float(scores.mean())


def test_taken_from_keys_it_is_a_bias_of_their_scores() -> None:
    """Attention to some tokens falls as if their scores were lower by that number, in every row."""
    loaded = smollm2()
    common, less = common_of(loaded), 0.3
    some = torch.arange(40, 120)
    moved, errors = placed(loaded, common, some), list[float]()
    for layer, (q, k, scale) in enumerate(attention_of(loaded, "\n\n".join(SHORT))[1:], 1):
        queries, seen = q[:, 150:600].reshape(k.shape[0], -1, q.shape[2]), k[:, :150]
        changed = seen.clone()
        changed[:, some] -= less * moved[layer]
        scores, got = (scale * torch.einsum("hnd,htd->hnt", queries, keys) for keys in (seen, changed))
        want = scores.clone()
        want[..., some] -= less
        before, want, got = (one.softmax(-1)[..., some].sum(-1) for one in (scores, want, got))
        errors.append(float((got - want).norm() / (before - want).norm()))
    assert max(errors) < 0.3
    assert sum(errors) / len(errors) < 0.15


def test_queries_without_anything_in_common_give_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 400, 16, generator=generator)
    queries[1] += 3 * torch.randn(16, generator=generator)
    found = common_key._common(queries)
    assert not found[0].any()
    assert not found[2].any()
    products = queries[1] @ found[1]
    assert float(products.mean()) == pytest.approx(1, abs=1e-4)
    assert float(products.std()) < 0.3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma4_text", "mimo_v2_flash", "gpt_oss", "qwen3_moe"])
def test_it_has_the_shape_of_what_is_cached(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with layers of several shapes, behind whose own heads and dimensions stand zeros."""
    monkeypatch.setattr(common_key, "_MOST_SPREAD", float("inf"))
    loaded = load_model(tiny_family(kind, vocab_size=49152), tokenizer=smollm2_tokenizer())
    common, room = common_of(loaded), loaded.geometry.room
    assert common.shape == (loaded.geometry.num_layers, room.heads, room.key_dim)
    assert bool(common.isfinite().all())
    assert common[1:].any()
    for layer, shape in zip(common, loaded.geometry.shapes, strict=True):
        assert not layer[shape.heads :].any()
        assert not layer[:, shape.key_dim :].any()


def test_latent_attention_has_none() -> None:
    """Its queries meet what it makes of the cache."""
    loaded = load_model(tiny_family("deepseek_v3", vocab_size=49152), tokenizer=smollm2_tokenizer())
    assert not common_of(loaded).any()


def test_it_can_be_stopped() -> None:
    loaded = load_model(tiny_family("llama", vocab_size=49152), tokenizer=smollm2_tokenizer())
    with pytest.raises(StoppedError):
        common_keys(loaded, loop_of(loaded.model), lambda: True)
