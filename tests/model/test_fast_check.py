"""Fast layers stand in for transformers' very own classes, unpatched, and only where they compute the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from torch import nn
from transformers.models.llama import modeling_llama

from fused_kv_kernels import why_not_native
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import FusedKVWarning, ModelChangedError
from fused_kv_llm.model import cpu_layers, load_model
from fused_kv_llm.model.cpu_layers import detach_cpu_layers
from fused_kv_llm.model.fast_check import _computed
from fused_kv_llm.model.fast_forward import FastForward

pytestmark = pytest.mark.skipif(
    why_not_native(torch.float32) is not None, reason=f"no native operators: {why_not_native(torch.float32)}"
)
PROMPT = rag_prompt(SHORT[:3])
in_both_dtypes = pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(why_not_native() is not None, reason=f"no fast layers: {why_not_native()}"),
        ),
    ],
    ids=str,
)


def fast_kinds(model: Any) -> set[str]:
    return {type(module).__name__ for module in model.modules() if isinstance(vars(module).get("forward"), FastForward)}


def engine(model: Any, folder: Path) -> FusedKVEngine:
    options = {"tokenizer": smollm2_tokenizer(), "preprocessing": "none", "store_misses": False}
    return FusedKVEngine(model, kv_dir=folder, **options)


def check_exact(model: Any, folder: Path) -> None:
    """At ratio 1 the engine gives the model's own logits."""
    with engine(model, folder) as fused:
        fused.build_kv_cache(SHORT[:3], progress=False)
        got = fused.prefill(PROMPT, recompute_ratio=1.0)[0].logits
        with torch.inference_mode():
            want = model(torch.tensor([fused.encode(PROMPT)])).logits[0, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def _doubled(own: Any) -> Any:
    """A patch that wears the name of what it replaces."""

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(self, *args, **kwargs)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

    return forward


class LlamaMLP(modeling_llama.LlamaMLP):
    """Somebody's own class, named as the one that it is derived from."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("module", ["somewhere.else", modeling_llama.__name__])
def test_a_class_of_the_same_name_is_another_class(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaMLP, "__module__", module)
    model = tiny_model()
    for layer in model.get_decoder().layers:
        layer.mlp.__class__ = LlamaMLP
    check_exact(model, tmp_path)
    assert "LlamaMLP" not in fast_kinds(model)
    assert "LlamaAttention" in fast_kinds(model)


@pytest.mark.parametrize("kind", ["LlamaMLP", "LlamaAttention", "LlamaRMSNorm"])
def test_a_class_that_was_patched_before_loading_runs_the_patch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = getattr(modeling_llama, kind)
    plain = load_model(tiny_model(), tokenizer=smollm2_tokenizer()).fingerprint
    monkeypatch.setattr(patched, "forward", _doubled(patched.forward))
    model = tiny_model()
    check_exact(model, tmp_path)
    assert kind not in fast_kinds(model)
    assert load_model(model, tokenizer=smollm2_tokenizer()).fingerprint != plain


def test_a_function_that_was_patched_beside_a_class_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.apply_rotary_pos_emb
    plain = load_model(tiny_model(), tokenizer=smollm2_tokenizer()).fingerprint
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        functools.wraps(own)(lambda q, k, *rest, **more: own(q * 2, k, *rest, **more)),
    )
    model = tiny_model()
    check_exact(model, tmp_path)
    assert load_model(model, tokenizer=smollm2_tokenizer()).fingerprint != plain


def test_linear_layers_that_were_patched_for_all_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Linear, "forward", _doubled(nn.Linear.forward))
    model = tiny_model()
    check_exact(model, tmp_path)
    assert "Linear" not in fast_kinds(model)


@pytest.mark.parametrize("kind", ["LlamaMLP", "LlamaAttention", "LlamaRMSNorm", "LlamaDecoderLayer"])
@in_both_dtypes
def test_fast_layers_of_a_class_that_is_patched_later_step_aside(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model().to(dtype)
    loaded = load_model(model, tokenizer=smollm2_tokenizer())
    before = _computed(model, loaded.geometry)[-1]
    patched = getattr(modeling_llama, kind)
    monkeypatch.setattr(patched, "forward", _doubled(patched.forward))
    got = _computed(model, loaded.geometry)[-1]
    detach_cpu_layers(model.modules())
    want = _computed(model, loaded.geometry)[-1]
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    assert float((got - want).norm() / want.norm()) < tolerance < 0.1 < float((before - want).norm() / want.norm())


@pytest.mark.parametrize("kind", ["LlamaMLP", "LlamaAttention", "LlamaRMSNorm", "LlamaDecoderLayer"])
def test_a_class_that_is_patched_under_a_live_engine_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tiny_model(), tmp_path) as fused:
        want = fused.prefill(PROMPT)[0].logits
        with monkeypatch.context() as patch:
            patched = getattr(modeling_llama, kind)
            patch.setattr(patched, "forward", _doubled(patched.forward))
            with pytest.raises(ModelChangedError, match=f"{kind}.forward is another one"):
                fused.prefill(PROMPT)
        assert torch.equal(fused.prefill(PROMPT)[0].logits, want)


def test_a_patch_of_code_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function stays, its code is exchanged."""
    own = modeling_llama.LlamaMLP.forward
    with engine(tiny_model(), tmp_path) as fused:

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(x)

        monkeypatch.setattr(own, "__code__", forward.__code__)
        with pytest.raises(ModelChangedError, match=r"LlamaMLP\.forward has other code"):
            fused.prefill(PROMPT)


def test_a_hook_of_all_modules_is_told_and_called(tmp_path: Path) -> None:
    seen: list[str] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        seen.append(type(module).__name__)

    model = tiny_model().bfloat16()
    with engine(model, tmp_path) as fused:
        plain = fused.model_fingerprint
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            with pytest.raises(ModelChangedError, match="a hook of all modules"):
                fused.prefill(PROMPT)
            with engine(model, tmp_path) as other:
                seen.clear()
                other.prefill(PROMPT)
                assert other.model_fingerprint != plain
        finally:
            handle.remove()
    # Parts that are computed together where nobody watches.
    assert {"Linear", "LlamaMLP", "LlamaRMSNorm", "LlamaDecoderLayer"} <= set(seen)


@in_both_dtypes
def test_fast_layers_that_compute_something_else_are_not_used(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cpu_layers.rms_norm
    monkeypatch.setattr(cpu_layers, "rms_norm", lambda x, weight, eps: own(x, weight, eps) * 1.5)
    model = tiny_model("phi3").to(dtype)
    with pytest.warns(FusedKVWarning, match=r"fast layers .* do not compute what the layers of 'Phi3ForCausalLM' do"):
        load_model(model, tokenizer=smollm2_tokenizer())
    assert fast_kinds(model) == set()


@in_both_dtypes
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_fast_layers_that_compute_the_same_are_used(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture).to(dtype)
    load_model(model, tokenizer=smollm2_tokenizer())
    assert len(fast_kinds(model)) >= 3


def test_reading_another_model_meanwhile_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers patches what all models inherit while it reads one, and the modules of torch that initialise."""
    from transformers.initialization import guard_torch_init_functions, no_init_weights, no_tie_weights

    model = tiny_model()
    with engine(model, tmp_path) as fused:
        want = fused.model_fingerprint
        with no_tie_weights(), no_init_weights(), guard_torch_init_functions():
            fused.prefill(PROMPT)
            assert load_model(model, tokenizer=smollm2_tokenizer()).fingerprint == want
