"""The kinds of weights that people have: each works, or is refused with what to do instead."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import (
    ConfigError,
    FusedKVError,
    MissingExtraError,
    ModelChangedError,
    ModelFileError,
    UnsupportedModelError,
)
from fused_kv_llm.model import load_model, weights
from fused_kv_llm.model.content_hash import hash_of
from fused_kv_llm.model.fingerprint import fingerprint_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PROMPT = rag_prompt(SHORT[:3])


def model_64(**options: Any) -> Any:
    """A model with dimensions that kernels for quantised weights take."""
    return tiny_model(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, **options)


def engine(model: Any, folder: Path) -> FusedKVEngine:
    options = {"tokenizer": smollm2_tokenizer(), "preprocessing": "none", "store_misses": False}
    return FusedKVEngine(model, kv_dir=folder, **options)


def check_works(model: Any, folder: Path, tolerance: float) -> None:
    """At ratio 1 the logits are the model's own; KV is found again; using the model has not changed it."""
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        before = model(ids).logits
    with engine(model, folder) as fused:
        fused.build_kv_cache(SHORT[:3], progress=False)
        got = fused.prefill(PROMPT, recompute_ratio=1.0)[0].logits
        fused.generate(PROMPT, max_tokens=2)
        with torch.inference_mode():
            want = fused.model(torch.tensor([fused.encode(PROMPT)])).logits[0, -1].float()
    assert float((got - want).norm() / want.norm()) <= tolerance
    with engine(model, folder) as fused:
        assert fused.prefill(PROMPT, recompute_ratio=0.0)[1].chunks_found == 3
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)


def check_refused(model: Any, error: type[FusedKVError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_model(model, tokenizer=smollm2_tokenizer())


# -- what torch and transformers bring ---------------------------------------------------------------------------------


def test_float16_works(tmp_path: Path) -> None:
    check_works(model_64().half(), tmp_path, 2e-2)


def test_a_compiled_model_is_used_uncompiled(tmp_path: Path) -> None:
    model = model_64()
    compiled = torch.compile(model, backend="eager")
    with engine(compiled, tmp_path) as fused:
        assert fused.model is model
        fused.build_kv_cache(SHORT[:2], progress=False)
        identity = fused.identity
    with engine(model, tmp_path) as fused:
        assert fused.identity == identity
        assert fused.prefill(PROMPT)[1].chunks_found == 2


def _compile_itself(model: Any) -> None:
    model.compile(backend="eager")


def _compile_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def _compile_layer(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


@pytest.mark.parametrize("compiling", [_compile_itself, _compile_forward, _compile_layer])
def test_what_is_compiled_in_place_is_refused(compiling: Callable[[Any], None], tmp_path: Path) -> None:
    model = model_64()
    with engine(model, tmp_path) as fused:
        compiling(model)
        check_refused(model, UnsupportedModelError, r"compiled in place.*Load it again without compiling it")
        if compiling is not _compile_itself:
            with pytest.raises(ModelChangedError):
                fused.prefill(PROMPT)


def test_weights_that_are_not_in_memory_are_refused(tmp_path: Path) -> None:
    import accelerate
    from transformers import AutoModelForCausalLM

    check_refused(model_64().to("meta"), ConfigError, "meta device, or offloaded: load it whole")
    offloaded = accelerate.cpu_offload(model_64(), execution_device=torch.device("cpu"))
    check_refused(offloaded, ConfigError, "meta device, or offloaded")
    model_64().save_pretrained(tmp_path / "model")
    places: dict[str, Any] = dict.fromkeys(
        ("model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    on_disk = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={**places, "model.layers.1": "disk"}, offload_folder=tmp_path / "offloaded"
    )
    check_refused(on_disk, ConfigError, "meta device, or offloaded")


def test_several_devices_are_refused_and_a_map_to_one_is_not(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = model_64()
    model.hf_device_map = {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1"}
    check_refused(model, UnsupportedModelError, r"several devices.*device_map=\{'': 'cuda:0'\}")
    model_64().save_pretrained(tmp_path / "model")
    check_works(AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map={"": "cpu"}), tmp_path / "kv", 1e-4)


def test_layers_that_round_by_the_whole_forward_are_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(model_64(), {torch.nn.Linear})
    fingerprint_model(model)
    check_refused(model, UnsupportedModelError, r"depends on the other tokens.*load_in_4bit")


@pytest.mark.parametrize("given", [3, None, torch.nn.DataParallel(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)])
def test_what_is_no_transformers_model_is_told(given: Any) -> None:
    check_refused(given, ConfigError, rf"A model of type {type(given).__name__} was given: pass a name")


# -- configurations of quantised weights -------------------------------------------------------------------------------


def quantised_folder(folder: Path, **quantisation: Any) -> Path:
    model_64().save_pretrained(folder)
    smollm2_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return folder


@pytest.mark.parametrize(
    ("method", "package"),
    [
        ("gptq", "optimum"),
        ("awq", "gptqmodel"),
        ("hqq", "hqq"),
        ("bitsandbytes", "bitsandbytes"),
        ("compressed-tensors", "compressed-tensors"),
        ("torchao", "torchao"),
        ("quanto", "optimum-quanto"),
    ],
)
def test_a_missing_package_is_named(method: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_is_installed", lambda name: False)
    folder = quantised_folder(tmp_path / "model", quant_method=method, load_in_4bit=True, bits=4)
    with pytest.raises(MissingExtraError, match=f"quantised by '{method}'.*pip install {package}$") as caught:
        load_model(folder)
    assert caught.value.package == package


def test_packages_are_looked_for() -> None:
    assert weights._is_installed("torch")
    assert not weights._is_installed("no_such_package_here")
    assert not weights._is_installed("no_such_package_here.part")


@pytest.mark.parametrize("method", ["hqq", "torchao", "gptq"])
def test_quantised_weights_that_cannot_be_read_are_told(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the package, or its absence, makes transformers raise."""
    monkeypatch.setattr(weights, "_is_installed", lambda name: True)
    folder = quantised_folder(tmp_path / "model", quant_method=method, bits=4, quant_type="nonsense")
    with pytest.raises(UnsupportedModelError, match=f"quantised by '{method}' and cannot be read here"):
        load_model(folder)


def test_a_configuration_that_does_not_fit_the_weights_is_told(tmp_path: Path) -> None:
    model_64().save_pretrained(tmp_path)
    smollm2_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    with pytest.raises(ModelFileError, match="do not fit its configuration"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="are damaged"):
        load_model(tmp_path)


def test_two_models_of_one_name_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_model(seed=seed).save_pretrained(tmp_path / str(seed) / "same-name")
        smollm2_tokenizer().save_pretrained(tmp_path / str(seed) / "same-name")
    first, second = (load_model(tmp_path / str(seed) / "same-name", dtype="float32") for seed in (0, 1))
    assert first.fingerprint != second.fingerprint
    tiny_model(seed=1).save_pretrained(tmp_path / "0" / "same-name")
    assert load_model(tmp_path / "0" / "same-name", dtype="float32").fingerprint == second.fingerprint


# -- tensors of any kind -----------------------------------------------------------------------------------------------


def test_tensors_of_any_kind_are_hashed_by_their_content() -> None:
    x = torch.arange(12.0).view(3, 4)
    kinds: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t,
        lambda t: t.bfloat16(),
        lambda t: t.to_sparse(),
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        lambda t: torch.quantize_per_tensor(t, 0.2, 0, torch.qint8),
        lambda t: torch.quantize_per_channel(t, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        lambda t: t.to(torch.float8_e4m3fn),
        lambda t: {"weight": t},
        lambda t: (t, None),
    ]
    hashes = [hash_of(kind(x)) for kind in kinds]
    assert hashes == [hash_of(kind(x.clone())) for kind in kinds]
    assert hashes != [hash_of(kind(x + 1)) for kind in kinds]
    assert len(set(hashes)) == len(hashes)
    assert all(a != b for a, b in zip(hashes, [hash_of(kind(x + 1)) for kind in kinds], strict=True))
    with pytest.raises(ConfigError, match="meta device"):
        hash_of(x.to("meta"))


# -- packages that are tried where they are installed ------------------------------------------------------------------


def reloaded(folder: Path, config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    model_64().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("options", [{"bnb_4bit_quant_type": "nf4"}, {"bnb_4bit_use_double_quant": True}], ids=str)
def test_bitsandbytes_in_four_bits_works(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = reloaded(tmp_path / "plain", BitsAndBytesConfig(load_in_4bit=True, **options))
    check_works(model, tmp_path / "kv", 5e-2)
    model.save_pretrained(tmp_path / "model")
    smollm2_tokenizer().save_pretrained(tmp_path / "model")
    read = load_model(tmp_path / "model", dtype="bfloat16")
    check_works(read.model, tmp_path / "kv", 5e-2)


def test_bitsandbytes_in_eight_bits_works_without_outliers(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    check_refused(
        reloaded(tmp_path / "plain", BitsAndBytesConfig(load_in_8bit=True)),
        UnsupportedModelError,
        r"llm_int8_threshold=6.0 .*llm_int8_threshold=0.0\), or with load_in_4bit=True",
    )
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    check_works(reloaded(tmp_path / "plain", config), tmp_path / "kv", 5e-2)


@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"]
)
def test_torchao_works(name: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = model_64().bfloat16()
    quantization.quantize_(model, getattr(quantization, name)())
    plain = load_model(model_64().bfloat16(), tokenizer=smollm2_tokenizer()).fingerprint
    assert load_model(model, tokenizer=smollm2_tokenizer()).fingerprint != plain
    check_works(model, tmp_path, 5e-2)


def test_hqq_works(tmp_path: Path) -> None:
    base = pytest.importorskip("hqq.models.hf.base")
    from hqq.core.quantize import BaseQuantizeConfig

    model = model_64().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base.AutoHQQHFModel.quantize_model(
            model,
            quant_config=BaseQuantizeConfig(nbits=4, group_size=64),
            compute_dtype=torch.bfloat16,
            device="cpu",
        )
    check_works(model, tmp_path, 5e-2)


def test_weights_that_are_not_what_their_configuration_says_are_told(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = quantised_folder(tmp_path, quant_method="bitsandbytes", load_in_4bit=True)
    with pytest.raises(UnsupportedModelError, match=r"cannot be run on cpu .*may not be what their configuration says"):
        load_model(folder)
