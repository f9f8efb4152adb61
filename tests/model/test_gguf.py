"""GGUF files: converted once, to the same model; what is damaged, foreign or told wrongly is refused."""

from __future__ import annotations

import errno
import multiprocessing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import TEMPLATE, gguf_model, vocabulary, write_gguf
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import MissingExtraError, ModelFileError, UnsupportedModelError
from fused_kv_llm.model import families, gguf_conversion, load_model
from fused_kv_llm.model.gguf_header import read_header
from fused_kv_llm.paths import cache_folder


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return write_gguf(tmp_path / "files" / "tiny.gguf", gguf_model())


def logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(3, 60)[None] % len(vocabulary())
    with torch.inference_mode():
        found: torch.Tensor = model(ids).logits
    return found


def converted() -> list[Path]:
    """What conversions left behind, whole or not."""
    folder = cache_folder() / "models"
    return [path for path in folder.iterdir() if path.suffix != ".lock"] if folder.is_dir() else []


def test_a_file_and_its_folder_are_the_model(file: Path) -> None:
    for given in (file, str(file), file.parent):
        loaded = load_model(given, dtype="float32")
        assert torch.equal(logits(loaded.model), logits(gguf_model()))
        assert loaded.tokenizer.chat_template == TEMPLATE
        assert loaded.tokenizer("the").input_ids[-1] == vocabulary().index("the")
        assert loaded.model_id == str(given)
    assert len(converted()) == 1


def test_it_is_converted_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(file, dtype="float32")
    monkeypatch.setattr(gguf_conversion, "_convert", lambda *_: pytest.fail("converted again"))
    moved = file.rename(file.with_name("moved") / "tiny.gguf") if file.with_name("moved").mkdir() else file
    assert load_model(moved, dtype="float32").fingerprint == first.fingerprint


def test_a_conversion_parses_it_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        original = getattr(gguf, name)
        monkeypatch.setattr(gguf, name, lambda *given: (calls.append(name), original(*given))[1])

    names = ("GGUFReader", "get_tensor_name_map")
    for name in names:
        counted(name)
    before = [getattr(gguf, name) for name in names]
    load_model(file)
    assert sorted(calls) == sorted(names)
    assert [getattr(gguf, name) for name in names] == before


def test_another_content_under_the_same_name_is_another_model(file: Path) -> None:
    import os

    before, first = file.stat(), load_model(file, dtype="float32")
    write_gguf(file, gguf_model(seed=1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    second = load_model(file, dtype="float32")
    assert torch.equal(logits(second.model), logits(gguf_model(seed=1)))
    assert first.fingerprint != second.fingerprint


def test_it_answers(file: Path, tmp_path: Path) -> None:
    chunk = "the other then the rather thin thing " * 4
    with FusedKVEngine(file, kv_dir=tmp_path / "kv", dtype="float32") as engine:
        engine.build_kv_cache([chunk], preprocess="later")
        report = engine.generate(f"{chunk} what?", max_tokens=2, recompute_ratio=0.0).report
    assert report.reused_tokens > 20


def test_its_tokenizer_can_be_had_alone(file: Path) -> None:
    loaded = load_model(gguf_model(), tokenizer=file)
    assert loaded.tokenizer.chat_template == TEMPLATE


def test_several_files_are_listed(file: Path) -> None:
    file.with_name("other.Q8_0.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelFileError, match=r"2 GGUF files: other.Q8_0.gguf, tiny.gguf. Give one of them, .*model="):
        load_model(file.parent)
    assert load_model(file.with_name("other.Q8_0.gguf"), dtype="float32").dtype == torch.float32


def test_a_folder_with_safetensors_is_read_as_before(file: Path) -> None:
    gguf_model(seed=1).save_pretrained(file.parent)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(file.parent)
    assert torch.equal(logits(load_model(file.parent, dtype="float32").model), logits(gguf_model(seed=1)))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.002, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelFileError, match=r"(damaged or truncated: .*|not a GGUF file: .*)"):
        load_model(file)
    assert not converted()


@pytest.mark.parametrize("content", [b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\n", b"\0" * 99])
def test_a_foreign_file_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ModelFileError, match="is not a GGUF file: it does not begin with GGUF"):
        load_model(file)


def test_flipped_bytes_of_the_header_crash_nothing(file: Path) -> None:
    """A damaged header is refused, or reads as another header; what it says of sizes is never believed."""
    whole, draw = file.read_bytes(), np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(whole)
        for place in draw.integers(4, 6000, 3):
            damaged[place] ^= int(draw.integers(1, 256))
        file.write_bytes(damaged)
        try:
            read_header(file)
        except ModelFileError:
            continue


def test_a_type_that_is_refused_is_not_converted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_conversion, "_convert", lambda *_: pytest.fail("converted"))
    write_gguf(file, gguf_model(), architecture="mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        load_model(file)
    write_gguf(file, gguf_model(), architecture="nobody-knows")
    with pytest.raises(UnsupportedModelError, match="architecture 'nobody-knows', which transformers does not read"):
        load_model(file)
    write_gguf(file, gguf_model(), architecture="gemma4")
    with pytest.raises(UnsupportedModelError, match="which of them share it is left out by transformers"):
        load_model(file)
    monkeypatch.setattr(families, "SUPPORTED_MODEL_TYPES", ("qwen2",))
    write_gguf(file, gguf_model())
    with pytest.raises(UnsupportedModelError, match="its type 'llama' has not been verified"):
        load_model(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention__sliding_window": 64}, "attention.sliding_window=64, of which transformers makes sliding_window="),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "rope.scaling.type='yarn'"),
        ({"attention__key_length": 16}, "attention.key_length=16, of which transformers makes head_dim=8"),
        ({"rope_factors_long.weight": np.ones(4, np.float32)}, "rope_factors_long.weight, which scales rotations"),
        ({"rope_freqs.weight": np.full(4, 3.0, np.float32)}, "rope_freqs.weight, which is not Llama 3's"),
        ({"blk.1.attn_q.bias": np.ones(48, np.float32)}, "holds 85,344 weights, of which transformers uses 85,296"),
    ],
    ids=["window", "yarn", "head_dim", "longrope", "factors", "bias"],
)
def test_what_transformers_leaves_out_is_refused(file: Path, changed: dict[str, Any], message: str) -> None:
    write_gguf(file, gguf_model(), **changed)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(file)
    assert not converted()


def test_scaled_rotations_are_taken_over(file: Path) -> None:
    """Linear scaling stands in settings, Llama 3's in a tensor of one factor for each frequency."""
    default = {"rope_type": "default", "rope_theta": 500000.0}
    linear = {**default, "rope_type": "linear", "factor": 4.0}
    llama3 = {
        **default, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain, in_line, in_bands = (
        gguf_model(rope_parameters=rotation, max_position_embeddings=16384) for rotation in (default, linear, llama3)
    )
    write_gguf(file, plain, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert torch.equal(logits(load_model(file, dtype="float32").model), logits(in_line))
    factors = plain.model.rotary_emb.inv_freq / in_bands.model.rotary_emb.inv_freq
    write_gguf(file, plain, **{"rope_freqs.weight": factors.numpy()})
    found = load_model(file, dtype="float32").model
    assert found.config.rope_parameters == llama3
    assert torch.allclose(logits(found), logits(in_bands), atol=1e-5)
    assert not torch.allclose(logits(plain), logits(in_bands), atol=1e-5)


def test_a_missing_weight_is_refused(file: Path) -> None:
    write_gguf(file, gguf_model(), **{"blk.2.ffn_up.weight": None})
    with pytest.raises(ModelFileError, match=r"lacks 1 weights of a LlamaForCausalLM: model.layers.2.mlp.up_proj"):
        load_model(file)
    assert not converted()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_leaves_nothing(file: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: PreTrainedModel, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "save_pretrained", fail)
        with pytest.raises(ModelFileError, match=r"could not be converted into .*0.0 GB of disk.*FUSED_KV_CACHE"):
            load_model(file)
    assert not converted()
    assert load_model(file, dtype="float32").dtype == torch.float32


def test_a_disk_without_room_is_known_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = gguf_conversion.shutil.disk_usage(file.parent)
    monkeypatch.setattr(gguf_conversion.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(gguf_conversion, "_read", lambda _: pytest.fail("read"))
    with pytest.raises(ModelFileError, match=r"the disk has 0\.0 GB left"):
        load_model(file)


def test_what_a_killed_conversion_left_is_no_model(file: Path) -> None:
    """A folder under the temporary name is never read, and is gone after the next conversion."""
    loaded = load_model(file, dtype="float32")
    (whole,) = converted()
    whole.rename(whole.with_name(f".tmp-{whole.name}"))
    for name in ("model.safetensors", "added_tokens.json"):
        (whole.with_name(f".tmp-{whole.name}") / name).write_bytes(b"half")
    assert load_model(file, dtype="float32").fingerprint == loaded.fingerprint
    assert converted() == [whole]
    assert not (whole / "added_tokens.json").exists()


def _load(path: str, folder: str, results: Any) -> None:
    import os

    # Native operators would be compiled into that folder, by both.
    os.environ |= {"FUSED_KV_CACHE": folder, "FUSED_KV_KERNELS": "torch"}
    results.put(load_model(path, dtype="float32").fingerprint)


@pytest.mark.heavy
def test_two_processes_convert_a_file_at_once(file: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_load, args=(str(file), str(cache_folder()), results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert len({results.get(timeout=120) for _ in processes}) == 1
    for process in processes:
        process.join(timeout=60)
    assert len(converted()) == 1


def test_the_package_that_is_needed_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = gguf_conversion.importlib.util.find_spec
    monkeypatch.setattr(
        gguf_conversion.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(MissingExtraError, match=r"fused-kv-llm\[gguf\]"):
        load_model(file)
