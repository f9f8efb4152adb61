"""Models by hub id: what is in no cache is refused at once without a network, and loaded with one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import served_hub, use_hub
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm.errors import ModelNotFoundError, UnsupportedModelError
from fused_kv_llm.model import load_model


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model; its fingerprint is remembered in a cache of its own."""
    tiny_model().save_pretrained(tmp_path / "files")
    smollm2_tokenizer().save_pretrained(tmp_path / "files")
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "files"


@contextmanager
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Point the hub's client at a port that nobody listens on; pauses longer than a second fail the test."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        use_hub(f"http://127.0.0.1:{unused.getsockname()[1]}", monkeypatch)
        sleep = time.sleep
        monkeypatch.setattr(
            time, "sleep", lambda seconds: sleep(seconds) if seconds < 1 else pytest.fail(f"waits {seconds} s")
        )
        yield


def test_an_unknown_id_is_refused_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with no_network(monkeypatch):
        with pytest.raises(ModelNotFoundError, match=r"'no/such-model' on this machine.*cannot be reached"):
            load_model("no/such-model")
        with pytest.raises(ModelNotFoundError, match=r"'no/such-tokenizer' on this machine.*cannot be reached"):
            load_model(tiny_model(), tokenizer="no/such-tokenizer")


def test_a_package_that_a_part_of_a_model_needs_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's vision tower needs one, also where only the text model is used."""

    def read(*args: object, **options: object) -> None:
        raise ImportError("\nTimmWrapperModel requires the timm library but it was not found in your environment.")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    with pytest.raises(UnsupportedModelError, match=r"parts that need a package .* requires the timm library"):
        load_model(files)


def test_a_path_that_is_not_there_is_no_matter_of_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with no_network(monkeypatch), pytest.raises(ModelNotFoundError, match="nor a local folder with"):
        load_model(tmp_path / "nothing" / "here")


def test_a_hub_that_answers_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        served_hub(tmp_path, "someone/tiny", monkeypatch),
        pytest.raises(ModelNotFoundError, match="not a valid model identifier"),
    ):
        load_model("no/such-model")


def test_a_hub_that_is_missed_once_is_asked_again(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    ask, missed = huggingface_hub.get_hf_file_metadata, list[str]()

    def miss_one(url: str) -> object:
        if not missed:
            missed.append(url)
            raise httpx.ConnectError("Temporary failure in name resolution")
        return ask(url)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", miss_one)
    with served_hub(files, "someone/tiny", monkeypatch):
        assert load_model("someone/tiny").model_id == "someone/tiny"
    assert len(missed) == 1


def test_a_model_comes_from_the_hub_and_then_from_its_cache(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served_hub(files, "someone/tiny", monkeypatch) as asked:
        online = load_model("someone/tiny").fingerprint
        assert any(line.startswith("GET") and line.endswith("model.safetensors") for line in asked)
    with no_network(monkeypatch):
        assert load_model("someone/tiny").fingerprint == online
