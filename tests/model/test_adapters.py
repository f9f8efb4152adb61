"""PEFT adapters: what is in effect is the model's identity, in memory and from a folder; the rest is refused."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import config_of, with_adapters
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.adapter.sharing import lease_engine
from fused_kv_llm.config import EngineConfig
from fused_kv_llm.errors import (
    ConfigError,
    MissingExtraError,
    ModelChangedError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from fused_kv_llm.model import adapter_files, load_model
from fused_kv_llm.model.adapters import ADAPTER_KINDS
from fused_kv_llm.selectors import Anchors, QueryAttention

pytestmark = [
    pytest.mark.filterwarnings("ignore:Adapter name .* should not be contained in the prefix:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
PROMPT = rag_prompt(SHORT[:3])


def fingerprint(model: Any) -> str:
    return load_model(model, tokenizer=smollm2_tokenizer()).fingerprint


def engine(model: Any, folder: Path, **options: Any) -> FusedKVEngine:
    options = {"tokenizer": smollm2_tokenizer(), "preprocessing": "none", "store_misses": False, **options}
    return FusedKVEngine(model, kv_dir=folder, **options)


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
    return logits


@pytest.mark.parametrize("kind", ADAPTER_KINDS)
def test_an_adapter_of_every_kind_gives_the_logits_of_its_model(kind: str, tmp_path: Path) -> None:
    model = with_adapters("one", kind=kind)
    with engine(model, tmp_path) as fused:
        fused.build_kv_cache(SHORT[:3], progress=False)
        got = fused.prefill(PROMPT, recompute_ratio=1.0)[0].logits
        want = plain_logits(model, fused.encode(PROMPT))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    with model.disable_adapter():
        assert not torch.allclose(plain_logits(model, fused.encode(PROMPT)), want, atol=1e-2)


def test_switching_an_adapter_makes_another_model(tmp_path: Path) -> None:
    """The KV of one adapter is not found with another, and is found again with the first."""
    model = with_adapters("one", "two")
    with engine(model, tmp_path) as fused:
        fused.build_kv_cache(SHORT[:3], progress=False)
        first = fused.prefill(PROMPT, recompute_ratio=0.0)[0].logits
    model.set_adapter("two")
    with engine(model, tmp_path) as fused:
        prompt, report = fused.prefill(PROMPT, recompute_ratio=0.0)
        assert report.chunks_found == 0
        torch.testing.assert_close(prompt.logits, plain_logits(model, fused.encode(PROMPT)), atol=1e-4, rtol=1e-4)
    model.set_adapter("one")
    with engine(model, tmp_path) as fused:
        prompt, report = fused.prefill(PROMPT, recompute_ratio=0.0)
        assert report.chunks_found == 3
        assert torch.equal(prompt.logits, first)


def _scale(model: Any) -> None:
    for _, module in model.named_modules():
        if hasattr(module, "set_scale"):
            module.set_scale("one", 2.0)


def _use_both(model: Any) -> None:
    model.base_model.set_adapter(["one", "two"])


def _delete_and_add(model: Any) -> None:
    model.delete_adapter("one")
    model.add_adapter("one", config_of("lora"))
    model.set_adapter("one")


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another": (lambda model: model.set_adapter("two"), r"active_adapter of .* is .*two.*, it was .*one"),
    "both": (_use_both, r"active_adapter of .* is \['one', 'two'\]"),
    "scaling": (_scale, r"scaling of .* is"),
    "none": (lambda model: model.base_model.disable_adapter_layers(), r"disable_adapters of .* is True, it was False"),
    "merged": (lambda model: model.merge_adapter(["one"]), r"merged_adapters of .* is \['one'\]"),
    "exchanged": (_delete_and_add, "is another one"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changing_adapters_under_a_live_engine_is_an_error(change: str, tmp_path: Path) -> None:
    apply, message = CHANGES[change]
    model = with_adapters("one", "two")
    with engine(model, tmp_path) as fused:
        fused.build_kv_cache(SHORT[:2], progress=False)
        fused.prefill(PROMPT)
        before = fused.model_fingerprint
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply(model)
        with pytest.raises(ModelChangedError, match=message):
            fused.prefill(PROMPT)
        with pytest.raises(ModelChangedError, match="make a new engine"):
            fused.build_kv_cache(SHORT[2:3], progress=False)
        with pytest.raises(ModelChangedError):
            engine(fused.loaded, tmp_path, tokenizer=None)
    with engine(model, tmp_path) as fused:
        assert fused.model_fingerprint != before
        assert fused.prefill(PROMPT)[1].chunks_found == 0


@pytest.mark.parametrize("change", ["add", "load", "delete"])
def test_adapters_that_come_or_go_are_seen(change: str, tmp_path: Path) -> None:
    model = with_adapters("one", "two")
    model.save_pretrained(tmp_path / "saved")
    with engine(model, tmp_path / "kv") as fused:
        if change == "add":
            model.add_adapter("three", config_of("lora"))
        elif change == "load":
            model.load_adapter(str(tmp_path / "saved" / "two"), "three")
        else:
            model.delete_adapter("two")
        with pytest.raises(ModelChangedError, match="was changed after this engine was made"):
            fused.prefill(PROMPT)


def test_an_adapter_that_is_switched_back_is_no_change(tmp_path: Path) -> None:
    model = with_adapters("one", "two")
    with engine(model, tmp_path) as fused:
        want = fused.prefill(PROMPT)[0].logits
        with model.disable_adapter(), pytest.raises(ModelChangedError):
            fused.prefill(PROMPT)
        assert torch.equal(fused.prefill(PROMPT)[0].logits, want)
        model.set_adapter("two")
        model.set_adapter("one")
        assert torch.equal(fused.prefill(PROMPT)[0].logits, want)


def test_work_in_the_background_is_not_done_with_another_adapter(tmp_path: Path) -> None:
    model = with_adapters("one", "two")
    neighbours = {SHORT[0]: [SHORT[1]], SHORT[1]: [SHORT[0]]}
    with engine(model, tmp_path, preprocessing="similar", num_neighbours=1, embedder=_Letters()) as fused:
        fused.build_kv_cache(SHORT[:2], neighbours=neighbours, preprocess="later", progress=False)
        model.set_adapter("two")
        with pytest.raises(ModelChangedError):
            fused.preprocess(progress=False)
        model.set_adapter("one")
        assert fused.preprocess(progress=False).chunks_preprocessed == 2


def test_anchors_are_not_made_with_another_adapter(tmp_path: Path) -> None:
    model = with_adapters("one", "two")
    selector = QueryAttention("mine", layers=(1,), anchors=Anchors("kvzip", 0.2))
    with engine(model, tmp_path) as fused:
        fused.build_kv_cache(SHORT[:2], progress=False)
        model.set_adapter("two")
        with pytest.raises(ModelChangedError):
            fused.build_anchors(SHORT[:2], selector=selector, progress=False)
        model.set_adapter("one")
        assert fused.build_anchors(SHORT[:2], selector=selector, progress=False) == 2


class _Letters:
    """Embeds a text by how often it has each letter."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        counts = [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
        return np.array(counts, dtype=np.float32)


def test_a_shared_engine_of_a_model_that_changed_is_not_leased_again(tmp_path: Path) -> None:
    """Framework objects share engines by their options: after a switch, a new object gets a new engine."""
    model = with_adapters("one", "two")
    config = EngineConfig(model=model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing="none")
    leases = [lease_engine(config), lease_engine(config)]
    assert leases[0].engine is leases[1].engine
    model.set_adapter("two")
    leases.append(lease_engine(config))
    assert leases[2].engine.identity != leases[0].engine.identity
    leases[2].engine.prefill(PROMPT)
    with pytest.raises(ModelChangedError):
        leases[0].engine.prefill(PROMPT)
    for lease in leases:
        lease.release()


def test_only_adapters_in_effect_count() -> None:
    one, both = with_adapters("one"), with_adapters("one", "two")
    for name, tensor in both.state_dict().items():
        if ".one." in name:
            tensor.copy_(one.state_dict()[name])
    assert fingerprint(one) == fingerprint(both), "one that waits does not matter"
    base = fingerprint(tiny_model())
    assert fingerprint(one) != base
    with one.disable_adapter():
        assert fingerprint(one) == base, "switched off, it is the base"
    unloaded = copy.deepcopy(one).merge_and_unload()
    one.merge_adapter()
    assert base != fingerprint(one) == fingerprint(unloaded), "merged, it is the merged model"


def test_the_kind_of_an_adapter_counts() -> None:
    """The same weights with DoRA, or with another scaling, compute something else."""
    prints = set()
    for options in ({}, {"lora_alpha": 4}, {"use_rslora": True}, {"use_dora": True}):
        prints.add(fingerprint(with_adapters("one", **options)))
    assert len(prints) == 4


def test_fingerprinting_and_asking_change_nothing(tmp_path: Path) -> None:
    model = with_adapters("one")
    ids = list(range(40, 60))
    want = plain_logits(model, ids)
    with engine(model, tmp_path) as fused:
        fused.build_kv_cache(SHORT[:2], progress=False)
        fused.generate(PROMPT, max_tokens=2)
    assert torch.equal(plain_logits(model, ids), want)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learnt_prompts_are_refused(kind: str) -> None:
    import peft

    model = peft.get_peft_model(tiny_model(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModelError, match=r"learnt tokens or keys before every prompt.*LoRA"):
        load_model(model, tokenizer=smollm2_tokenizer())


def test_adapters_that_depend_on_the_place_are_refused() -> None:
    model = with_adapters("one", alora_invocation_tokens=[5, 6])
    with pytest.raises(UnsupportedModelError, match="activated LoRA"):
        load_model(model, tokenizer=smollm2_tokenizer())


def test_adapters_that_were_not_tested_are_refused() -> None:
    import peft

    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"type ADAPTION_PROMPT, which was not tested.*LORA"):
        load_model(peft.get_peft_model(tiny_model(), config), tokenizer=smollm2_tokenizer())


def test_merged_and_switched_off_is_refused() -> None:
    model = with_adapters("one")
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    with pytest.raises(ConfigError, match="unmerge_adapter"):
        load_model(model, tokenizer=smollm2_tokenizer())


# -- from a folder ---------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a base model, and one with an adapter for it beside."""
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    smollm2_tokenizer().save_pretrained(tmp_path / "base")
    base.name_or_path = base.config.name_or_path = str(tmp_path / "base")
    with_adapters("default", model=base).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_loaded_from_its_folder(saved: Path, tmp_path: Path) -> None:
    with engine(saved, tmp_path / "kv", tokenizer=None, dtype="float32") as fused:
        fused.build_kv_cache(SHORT[:3], progress=False)
        got = fused.prefill(PROMPT, recompute_ratio=1.0)[0].logits
        first = fused.model_fingerprint
        want = plain_logits(with_adapters("default"), fused.encode(PROMPT))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert load_model(saved, dtype="float32").fingerprint == first
    assert load_model(tmp_path / "base", dtype="float32").fingerprint != first


def test_another_adapter_in_the_same_folder_is_another_model(saved: Path, tmp_path: Path) -> None:
    first = load_model(saved, dtype="float32").fingerprint
    file = saved / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 32}))
    assert load_model(saved, dtype="float32").fingerprint != first


def test_an_adapter_without_peft_names_the_extra(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        adapter_files.importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name)
    )
    with pytest.raises(MissingExtraError, match=r"is an adapter, and .*fused-kv-llm\[adapters\]"):
        load_model(saved)


def test_adapters_that_are_not_whole_are_told(saved: Path, tmp_path: Path) -> None:
    weights, config = saved / "adapter_model.safetensors", saved / "adapter_config.json"
    whole, described = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="cannot be put into its base"):
        load_model(saved)
    weights.unlink()
    with pytest.raises(ModelFileError, match="has no weights"):
        load_model(saved)
    config.write_text(json.dumps({**described, "base_model_name_or_path": None}))
    with pytest.raises(ModelFileError, match="names no base model"):
        load_model(saved)
    config.write_text("{")
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_model(saved)
    config.write_text(json.dumps({**described, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(ModelNotFoundError, match=r"base model of the adapter in .*gone"):
        load_model(saved)
    shutil.rmtree(saved)
    with pytest.raises(ModelNotFoundError, match="adapter"):
        load_model(saved)
