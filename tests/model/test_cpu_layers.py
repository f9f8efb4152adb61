"""The fast layers of a decoder on the CPU: the same numbers as transformers' own, and no traces in the user's model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import ARCHITECTURES, smollm2_tokenizer, tiny_model
from torch.nn.functional import linear

from fused_kv_kernels import few_row_linears, few_row_mlp, float_linear, why_not_native
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import CachePool, ForwardPass, FusedCache, cpu_layers, decoder_layer, forward_rows, load_model
from fused_kv_llm.model.cpu_layers import attach_cpu_layers
from fused_kv_llm.model.cpu_linear import _has_avx512_that_mkl_ignores, linear_in_onednn
from fused_kv_llm.model.fast_forward import own_parts
from fused_kv_llm.model.last_row import attach_last_row
from fused_kv_llm.model.pass_context import running

IDS = torch.arange(3, 43)[None]
PASS = ForwardPass(torch.arange(5), 5)


def modules_with_own_forward(model: Any) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "forward" in vars(module)]


needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
needs_float32 = pytest.mark.skipif(
    why_not_native(torch.float32) is not None, reason=f"no native operators: {why_not_native(torch.float32)}"
)


@needs_native
@needs_float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_all_norms_attentions_and_mlps_have_a_fast_way(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture).to(dtype)
    attach_cpu_layers(model)
    attach_cpu_layers(model)
    fast = [name for name in modules_with_own_forward(model) if name != "Linear"]
    norms = [type(module).__name__ for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    # An attention and an MLP a layer, and in bfloat16 the layer around them.
    whole = dtype == torch.bfloat16 and architecture != "phi3"
    assert len(fast) == len(norms) + (2 + whole) * model.config.num_hidden_layers
    in_float16 = tiny_model(architecture).half()
    attach_cpu_layers(in_float16)
    assert modules_with_own_forward(in_float16) == []


@pytest.mark.parametrize("faster", [False, True])
def test_linear_layers_in_float32_take_the_faster_way(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the decoder's, and none of those that are no longer plain."""
    monkeypatch.setattr(cpu_layers, "onednn_is_faster", lambda: faster)
    monkeypatch.setattr(cpu_layers, "has_eight_bit_linears", lambda: False)
    calls: list[torch.Size] = []
    monkeypatch.setattr(cpu_layers, "linear_in_onednn", lambda x, w, b: calls.append(w.shape) or linear(x, w, b))
    model = tiny_model()
    attach_cpu_layers(model)
    layers = model.config.num_hidden_layers
    assert modules_with_own_forward(model).count("Linear") == faster * 7 * layers
    mlp = model.get_decoder().layers[0].mlp
    x = torch.randn(1, 5, 48)
    with torch.inference_mode():
        want = mlp(x)
        assert calls == []
        with running(PASS):
            torch.testing.assert_close(mlp(x), want, atol=1e-6, rtol=1e-5)
            assert len(calls) == 3 * faster
            mlp.double()
            torch.testing.assert_close(mlp(x.double()), want.double(), atol=1e-6, rtol=1e-5)
    assert len(calls) == 3 * faster


@needs_native
def test_linear_layers_in_bfloat16_take_the_native_way_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values at once, and so gate and up; the head too; of a hooked layer its hook is called."""
    calls: list[int] = []
    monkeypatch.setattr(
        cpu_layers, "few_row_linears", lambda x, layers: calls.append(len(layers)) or few_row_linears(x, layers)
    )
    model = tiny_model().bfloat16()
    attach_cpu_layers(model)
    layers = model.config.num_hidden_layers
    assert modules_with_own_forward(model).count("Linear") == 7 * layers + 1
    x = torch.randn(1, 5, 48).bfloat16()
    mlp = model.get_decoder().layers[0].mlp
    with torch.inference_mode():
        want = mlp(x)
        assert calls == []
        with running(PASS):
            torch.testing.assert_close(mlp(x), want, atol=2e-2, rtol=2e-2)
            assert calls == [2, 1]
            seen: list[int] = []
            handle = mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
            torch.testing.assert_close(mlp(x), want, atol=2e-2, rtol=2e-2)
            assert seen == [1]
            handle.remove()
            mlp.float()
            torch.testing.assert_close(mlp(x.float()), want.float(), atol=2e-2, rtol=2e-2)
            calls.clear()
            model.lm_head(x)
    assert calls == [1]


@needs_native
def test_logits_are_not_rounded() -> None:
    """However many rows there are, and each row for itself; a head that is no longer plain is torch's."""
    model = tiny_model(hidden_size=96).bfloat16()
    attach_cpu_layers(model)
    x, head = torch.randn(1, 200, 96).bfloat16(), model.lm_head
    PASS.head = head
    with torch.inference_mode(), running(PASS):
        got = head(x)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, linear(x.float(), head.weight.float()), atol=1e-5, rtol=1e-5)
        assert torch.equal(head(x[:, 97:101]), got[:, 97:101])
        assert torch.equal(float_linear(x, (head.weight, None)), got)
        assert got.bfloat16().unique().numel() < got.unique().numel()
        # Who stands behind the head, or on it, expects the model's dtype.
        PASS.head = torch.nn.Sequential(head)
        rounded = got[:, :9].bfloat16()
        assert torch.equal(PASS.head(x[:, :9]), rounded)
        PASS.head, seen = head, list[torch.dtype]()
        handle = head.register_forward_hook(lambda *given: seen.append(given[2].dtype))
        assert torch.equal(head(x[:, :9]), rounded)
        assert seen == [torch.bfloat16]
        handle.remove()
        head.double()
        assert head(x.double()).dtype == torch.float64
    PASS.head = None


@needs_native
@pytest.mark.parametrize(
    "part",
    [
        "",
        "input_layernorm",
        "self_attn",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp",
        "mlp.down_proj",
        "mlp.act_fn",
    ],
)
def test_a_layer_goes_by_its_parts_only_where_one_is_hooked(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = list[int](), few_row_mlp
    monkeypatch.setattr(decoder_layer, "few_row_mlp", lambda x, *rest: calls.append(x.shape[1]) or real(x, *rest))
    model = tiny_model(num_hidden_layers=3).bfloat16()
    prompt = rag_prompt(SHORT[:3])

    def logits() -> torch.Tensor:
        with FusedKVEngine(model, preprocessing="none", tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine:
            engine.build_kv_cache(SHORT[:3], progress=False)
            calls.clear()
            seen.clear()
            return engine.prefill(prompt, recompute_ratio=0.0)[0].logits

    seen: list[int] = []
    want = logits()
    # The last layer is computed for the last row only, by its parts.
    rows = calls[-1]
    assert calls[-2:] == [rows, rows]
    if part:
        hooked = model.get_decoder().layers[1].get_submodule(part)
        hooked.register_forward_hook(lambda *_: seen.append(1))
    got = logits()
    assert torch.equal(got, want)
    assert calls == ([rows] if part else [rows, rows])
    assert not part or seen == [1]


class _OtherLinear(torch.nn.Linear):
    """A layer that somebody derives, as wrappers of weights do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _exchange_weight(layer: Any) -> None:
    layer.self_attn.q_proj.weight = torch.nn.Parameter(-layer.self_attn.q_proj.weight)


def _overwrite_weight(layer: Any) -> None:
    layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data * 2


def _exchange_part(layer: Any) -> None:
    layer.mlp = copy.deepcopy(layer.mlp)
    layer.mlp.down_proj.weight.data.mul_(2)


def _exchange_class(layer: Any) -> None:
    layer.self_attn.o_proj.__class__ = _OtherLinear


def _replace_forward(layer: Any) -> None:
    own = layer.self_attn.v_proj.forward
    layer.self_attn.v_proj.forward = lambda x: 2 * own(x)


def _change_epsilon(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 0.5


def _wrap_layer(layer: Any) -> None:
    own = layer.forward
    layer.forward = lambda *args, **kwargs: 2 * own(*args, **kwargs)


CHANGES = [
    _exchange_weight,
    _overwrite_weight,
    _exchange_part,
    _exchange_class,
    _replace_forward,
    _change_epsilon,
    _wrap_layer,
]


@needs_native
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_of_a_layer_does_not_outlive_a_change(change: Callable[[Any], None], architecture: str) -> None:
    """After a change, a pass is that of a model that was changed before it ever ran."""
    model = tiny_model(architecture).bfloat16()
    changed = copy.deepcopy(model)
    change(changed.get_decoder().layers[0])

    def logits(of: Any) -> torch.Tensor:
        loaded = load_model(of, tokenizer=smollm2_tokenizer())
        cache = FusedCache(loaded.geometry, 20, CachePool(torch.bfloat16, torch.device("cpu")))
        rows = torch.arange(20)
        with torch.inference_mode():
            return forward_rows(loaded, IDS[:, :20], rows, cache, ForwardPass(rows, 20))

    first = logits(model)
    layer = model.get_decoder().layers[0]
    assert own_parts(layer) is own_parts(layer)
    change(layer)
    got, want = logits(model), logits(changed)
    assert not torch.equal(got, first)
    if change is _wrap_layer:
        # Wrapped before it was loaded, a layer is transformers' to compute, which rounds the residual stream.
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    else:
        assert torch.equal(got, want)


@needs_native
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_gate_that_is_exchanged_or_hooked_later_is_used(architecture: str) -> None:
    model = tiny_model(architecture).bfloat16()
    attach_cpu_layers(model)
    mlp, x, seen = model.get_decoder().layers[0].mlp, torch.randn(1, 5, 48).bfloat16(), []
    name = "act_fn" if hasattr(mlp, "act_fn") else "activation_fn"
    with torch.inference_mode(), running(PASS):
        silu = mlp(x)
        handle = getattr(mlp, name).register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(mlp(x), silu, atol=2e-2, rtol=2e-2)
        assert seen == [1]
        handle.remove()
        setattr(mlp, name, torch.nn.Tanh())
        torch.testing.assert_close(mlp(x), type(mlp).forward(mlp, x), atol=0, rtol=0)
        assert not torch.allclose(mlp(x), silu, atol=2e-2)


def test_onednn_is_for_avx512_that_mkl_ignores() -> None:
    assert _has_avx512_that_mkl_ignores("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f fma")
    assert not _has_avx512_that_mkl_ignores("vendor_id : GenuineIntel\nflags : fpu avx2 avx512f fma")
    assert not _has_avx512_that_mkl_ignores("vendor_id : AuthenticAMD\nflags : fpu avx2 fma")
    assert not _has_avx512_that_mkl_ignores("")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_onednn_multiplies_as_torch_does(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, rows, 96, generator=generator).transpose(0, 1)
    weight, offset = torch.randn(50, 96, generator=generator), torch.randn(50, generator=generator) if bias else None
    with torch.inference_mode():
        got = linear_in_onednn(x, weight, offset)
    torch.testing.assert_close(got, linear(x, weight, offset), atol=2e-5, rtol=1e-5)


@needs_native
def test_what_somebody_else_replaced_stays() -> None:
    model = tiny_model().bfloat16()
    calls: list[int] = []
    norm = model.get_decoder().norm
    own = norm.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return own(x)

    norm.forward = counted
    load_model(model, tokenizer=smollm2_tokenizer())
    # The checks at loading call it as well.
    calls.clear()
    with torch.inference_mode():
        model(IDS)
    assert calls == [1]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace(_method)?` is deprecated:DeprecationWarning")
@needs_native
@needs_float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loaded_model_can_be_pickled_copied_and_compiled(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    load_model(model, tokenizer=smollm2_tokenizer())
    with torch.inference_mode():
        want = model(IDS).logits
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert torch.equal(other(IDS).logits, want)
            assert other.get_decoder().norm.forward.module is other.get_decoder().norm
        mlp = model.get_decoder().layers[0].mlp
        x, y = torch.randn(2, 1, 5, 48).to(dtype)
        traced = torch.jit.trace(mlp, x)
        assert torch.equal(traced(y), mlp(y))
        compiled = torch.compile(mlp, backend="eager", fullgraph=True)
        assert torch.equal(compiled(y), mlp(y))


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
        with running(ForwardPass(torch.arange(40), 40, final_layer=model.config.num_hidden_layers - 1)):
            got = model(IDS, logits_to_keep=1).logits
        after = model(IDS).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after[:, -1:], want, atol=1e-5, rtol=1e-5)
    layer = model.get_decoder().layers[-1]
    assert [len(module._forward_pre_hooks) for module in (layer.mlp, layer.self_attn.o_proj)] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_users_model_keeps_its_own_results(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    before = model.generate(IDS, max_new_tokens=8, do_sample=False)
    logits = copy.deepcopy(model)(IDS).logits
    load_model(model, tokenizer=smollm2_tokenizer())
    assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), before)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_models_that_cannot_be_used_are_told() -> None:
    with pytest.raises(ConfigError, match="float64"):
        load_model(tiny_model().double(), tokenizer=smollm2_tokenizer())
    with pytest.raises(ConfigError, match="meta device"):
        load_model(tiny_model().to("meta"), tokenizer=smollm2_tokenizer())


def test_another_attention_after_loading_is_told(tmp_path: Path) -> None:
    model = tiny_model()
    options = {"kv_dir": tmp_path, "preprocessing": "none", "store_misses": False}
    with FusedKVEngine(model, tokenizer=smollm2_tokenizer(), **options) as engine:
        model.set_attn_implementation("sdpa")
        with pytest.raises(ConfigError, match="set to 'sdpa' after it was loaded"):
            engine.generate("Hello", max_tokens=1)
