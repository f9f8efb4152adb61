"""The fast layers of a decoder on the CPU: the same numbers as transformers' own, and no traces in the user's model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import ARCHITECTURES, smollm2_tokenizer, tiny_model

from fused_kv_kernels import why_not_native
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.model import load_model
from fused_kv_llm.model.cpu_layers import attach_cpu_layers
from fused_kv_llm.model.last_row import attach_last_row, last_row_only

IDS = torch.arange(3, 43)[None]


def modules_with_own_forward(model: Any) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


@pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_all_norms_attentions_and_mlps_go_the_fast_way(architecture: str) -> None:
    model = tiny_model(architecture).bfloat16()
    plain = copy.deepcopy(model)
    attach_cpu_layers(model)
    fast = modules_with_own_forward(model)
    layers = model.config.num_hidden_layers
    norms = [type(module).__name__ for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(fast) == len(norms) + 2 * layers
    with torch.inference_mode():
        got, want = model(IDS).logits, plain(IDS).logits
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert torch.equal(copy.deepcopy(model)(IDS).logits, plain(IDS).logits), (
        "with gradients, transformers' own code runs"
    )


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_fused_bfloat16_is_as_near_to_float32_as_transformers_is(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    exact = copy.deepcopy(model)
    plain = copy.deepcopy(model).bfloat16()
    with FusedKVEngine(
        model.bfloat16(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing="none", store_misses=False
    ) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        prompt = rag_prompt(SHORT[:3])
        ids = torch.tensor([engine.encode(prompt)])
        fused, _ = engine.prefill(prompt, recompute_ratio=1.0)
    with torch.inference_mode():
        want, other = exact(ids).logits[0, -1], plain(ids).logits[0, -1].float()
    noise = float((other - want).abs().max())
    assert float((fused.logits - want).abs().max()) <= 3 * noise + 1e-3


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_last_row_alone_gives_the_same_logits(architecture: str) -> None:
    model = tiny_model(architecture)
    attach_last_row(model)
    attach_last_row(model)
    with torch.inference_mode():
        want = model(IDS, logits_to_keep=1).logits
        with last_row_only(True):
            got = model(IDS, logits_to_keep=1).logits
        after = model(IDS).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[:, -1:], want, atol=1e-5, rtol=1e-5)
    layer = model.get_decoder().layers[-1]
    assert [len(module._forward_pre_hooks) for module in (layer.mlp, layer.self_attn.o_proj)] == [1, 1]


def test_a_users_model_keeps_its_own_results() -> None:
    model = tiny_model().bfloat16()
    before = model.generate(IDS, max_new_tokens=8, do_sample=False)
    load_model(model, tokenizer=smollm2_tokenizer())
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), before)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
