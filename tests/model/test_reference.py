"""The reference KV of an identity: a model that computes something else under the same fingerprint is told."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.engine.reference import check_reference
from fused_kv_llm.errors import FusedKVWarning, ModelChangedError
from fused_kv_llm.model import compare_reference, compute_reference, load_model, loading, lock_of, measure_noise
from fused_kv_llm.store import KVStore

PROMPT = rag_prompt(SHORT[:3])
TOLD = "does not compute what the KV in .* was computed with"


def engine(model: Any, folder: Path) -> FusedKVEngine:
    options = {"tokenizer": smollm2_tokenizer(), "preprocessing": "none", "store_misses": False}
    return FusedKVEngine(model, kv_dir=folder, **options)


class Hidden:
    """A number that no fingerprint sees, in whichever thread the model is run."""

    __slots__ = ("_queue",)

    def __init__(self, number: float) -> None:
        self._queue: SimpleQueue[float] = SimpleQueue()
        self._queue.put(number)

    def __call__(self) -> float:
        number = self._queue.get()
        self._queue.put(number)
        return number


def hidden_scale(scale: float, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with a hook that scales by a number that no fingerprint sees."""
    hidden = Hidden(scale)

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * hidden()

    model = tiny_model().to(dtype)
    model.get_decoder().layers[1].self_attn.v_proj.register_forward_hook(hook)
    return model


def rows(folder: Path, query: str, *values: Any) -> list[Any]:
    connection = sqlite3.connect(folder / "index.sqlite")
    with connection:
        found = connection.execute(query, values).fetchall()
    connection.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_that_computes_something_else_is_told(dtype: torch.dtype, tmp_path: Path) -> None:
    with engine(hidden_scale(1.0, dtype), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
        identity = fused.identity
    with engine(hidden_scale(1.0, dtype), tmp_path) as fused:
        assert fused.identity == identity
        assert fused.prefill(PROMPT)[1].chunks_found == 1
    with pytest.raises(ModelChangedError, match=rf"{TOLD}.*layer 1 differ by .*another kv_dir or tenant"):
        engine(hidden_scale(1.5, dtype), tmp_path)
    # The first model still finds its KV, and the folder is not left open.
    with engine(hidden_scale(1.0, dtype), tmp_path) as fused:
        assert fused.prefill(PROMPT)[1].chunks_found == 1


def test_what_only_the_output_shows_is_told(tmp_path: Path) -> None:
    """The KV is the same; the logits are not."""

    def build(scale: float) -> Any:
        hidden, model = Hidden(scale), tiny_model()
        model.lm_head.register_forward_hook(lambda module, inputs, output: output * hidden())
        return model

    with engine(build(1.0), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
    with pytest.raises(ModelChangedError, match=TOLD):
        engine(build(1.5), tmp_path)


def test_without_stored_chunks_the_reference_is_made_anew(tmp_path: Path) -> None:
    with engine(hidden_scale(1.0), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
        fused.delete_chunks(SHORT[:1])
    with engine(hidden_scale(1.5), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
    with pytest.raises(ModelChangedError, match=TOLD):
        engine(hidden_scale(1.0), tmp_path)


def test_an_absent_reference_is_written(tmp_path: Path) -> None:
    with engine(hidden_scale(1.0), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
    rows(tmp_path, "DELETE FROM settings WHERE name LIKE 'reference:%'")
    with engine(hidden_scale(1.0), tmp_path):
        pass
    assert len(rows(tmp_path, "SELECT 1 FROM settings WHERE name LIKE 'reference:%'")) == 1
    with pytest.raises(ModelChangedError, match=TOLD):
        engine(hidden_scale(1.5), tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty"])
def test_a_damaged_reference_is_written_again(damage: str, tmp_path: Path) -> None:
    with engine(hidden_scale(1.0), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
    (name, value), *_ = rows(tmp_path, "SELECT name, value FROM settings WHERE name LIKE 'reference:%'")
    middle = len(value) // 2
    damaged = {
        "cut": value[: middle - middle % 4],
        "flipped": value[:middle] + ("A" if value[middle] != "A" else "B") + value[middle + 1 :],
        "text": "not base64!",
        "empty": "",
    }[damage]
    rows(tmp_path, "UPDATE settings SET value = ? WHERE name = ?", damaged, name)
    with (
        pytest.warns(FusedKVWarning, match="reference KV of .* is damaged"),
        engine(hidden_scale(1.0), tmp_path) as one,
    ):
        assert one.prefill(PROMPT)[1].chunks_found == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(hidden_scale(1.0), tmp_path).close()
    with pytest.raises(ModelChangedError, match=TOLD):
        engine(hidden_scale(1.5), tmp_path)


def test_a_reference_is_encrypted_where_the_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = b"values"
    with engine(hidden_scale(1.0), tmp_path / "plain") as fused:
        identity = fused.identity
        assert plain in (fused.store._parts.index.records.read(f"reference:{identity}") or b"")
    monkeypatch.setenv("FUSED_KV_ENCRYPTION_KEY", "ab" * 32)
    with engine(hidden_scale(1.0), tmp_path / "sealed") as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
        assert fused.identity == identity
    import base64

    query = "SELECT value FROM settings WHERE name LIKE 'reference:%'"
    assert plain in base64.b64decode(rows(tmp_path / "plain", query)[0][0])
    assert plain not in base64.b64decode(rows(tmp_path / "sealed", query)[0][0])
    engine(hidden_scale(1.0), tmp_path / "sealed").close()
    with pytest.raises(ModelChangedError, match=TOLD):
        engine(hidden_scale(1.5), tmp_path / "sealed")


def test_a_read_only_store_is_compared_with_and_not_changed(tmp_path: Path) -> None:
    with engine(hidden_scale(1.0), tmp_path) as fused:
        fused.build_kv_cache(SHORT[:1], progress=False)
        identity = fused.identity
    same, other = (load_model(hidden_scale(scale), tokenizer=smollm2_tokenizer()) for scale in (1.0, 1.5))
    with KVStore(tmp_path, read_only=True) as store:
        check_reference(same, store, identity, lock_of(same.model))
        with pytest.raises(ModelChangedError, match=TOLD):
            check_reference(other, store, identity, lock_of(other.model))
        check_reference(other, store, "0" * 64, lock_of(other.model))
        assert store.references.read("0" * 64) is None


def test_the_first_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that find no reference both write one; the second compares with what the first has written."""
    first, second = (load_model(hidden_scale(scale), tokenizer=smollm2_tokenizer()) for scale in (1.0, 1.5))
    identity = "1" * 64
    with KVStore(tmp_path) as mine, KVStore(tmp_path) as theirs:
        read = mine.references.read
        monkeypatch.setattr(mine.references, "read", lambda name: monkeypatch.undo() or None)
        assert read(identity) is None
        check_reference(first, theirs, identity, lock_of(first.model))
        with pytest.raises(ModelChangedError, match=TOLD):
            check_reference(second, mine, identity, lock_of(second.model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_rounding_is_no_difference(architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another processor: without the fast layers, and with one thread or several."""
    fast = load_model(tiny_model(architecture).to(dtype), tokenizer=smollm2_tokenizer())
    reference = measure_noise(fast, compute_reference(fast))
    monkeypatch.setattr(loading, "attach_checked", lambda *_: None)
    own = load_model(tiny_model(architecture).to(dtype), tokenizer=smollm2_tokenizer())
    assert compare_reference(reference, compute_reference(own), dtype) is None


def test_another_shape_is_a_difference() -> None:
    loaded = load_model(tiny_model(), tokenizer=smollm2_tokenizer())
    reference = compute_reference(loaded)
    fewer = {name: tensor[:1] for name, tensor in reference.items()}
    assert compare_reference(fewer, reference, torch.float32) is not None
    assert compare_reference({}, reference, torch.float32) is not None
    spoilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in reference.items()}
    assert compare_reference(reference, spoilt, torch.float32) is not None
