"""An ingestion actor without Ray: its forwards, and a shared store whose objects are damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import EngineConfig
from fused_kv_llm.engine import similarity_of
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.model import PackedChunk
from fused_kv_llm.offline import context_prefill, nearest
from fused_kv_llm.offline.prompt_prefill import PromptPrefill
from fused_kv_llm.report import IngestReport
from fused_kv_llm.scale.first_pass import FirstPass
from fused_kv_llm.scale.prefill_actor import PrefillActor
from fused_kv_llm.scale.second_pass import SecondPass
from fused_kv_llm.store import KVStore

TEXTS = [f"A text that is long enough to be told apart from others, number {number}." for number in range(3)]


class OneActor:
    """A pool of one actor that lives in this process."""

    def __init__(self, actor: PrefillActor) -> None:
        self._actor = actor

    def run(self, method: str, tasks: Any) -> Iterator[tuple[int, Any]]:
        for number, task in enumerate(tasks):
            yield number, getattr(self._actor, method)(*task)


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    smollm2_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def ingest(model: Path, shared: Path, name: str, *, learn: bool = True) -> tuple[IngestReport, Path]:
    folder, report = model.parent / name, IngestReport()
    options = {"model": str(model), "kv_dir": str(folder / "actor"), "remote": f"file://{shared}",
               "preprocessing": "none", "memory_bytes": 0, "batch_tokens": 512}  # fmt: skip
    actor = PrefillActor(options, {})
    facts = actor.start()
    with KVStore(folder / "driver", memory_bytes=0, remote=f"file://{shared}", learn=learn) as store:
        FirstPass(OneActor(actor), store, facts, 512).run(TEXTS, report, progress=False)
    actor.close()
    return report, folder


def test_a_damaged_object_is_computed_again_and_replaced(model: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    ingest(model, shared, "one")
    paths = sorted(shared.glob("*.safetensors"))
    sound = [path.read_bytes() for path in paths]
    for at in (40, len(sound[0]) - 3):
        raw = bytearray(sound[0])
        raw[at] ^= 1
        paths[0].write_bytes(raw)
        with pytest.warns(FusedKVWarning, match="cannot be used"):
            # A driver that learns only reads headers: it would take the chunk for stored.
            ingest(model, shared, f"two-{at}", learn=False)
        assert paths[0].read_bytes() != bytes(raw)
        with KVStore(tmp_path / f"reader-{at}", remote=f"file://{shared}") as store:
            assert store.stats().chunks == 3
            assert store.shared.check().findings == []
    # Nothing is left to do.
    assert ingest(model, shared, "three")[0].chunks_new == 0


@pytest.mark.parametrize("preprocessing", ["similar", "fusionrag"])
def test_the_second_pass_has_the_forwards_of_one_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preprocessing: str
) -> None:
    """The same rows in the same order, so that the last bits are the same too."""
    texts = [f"Number {number} of the harbour's rules. " + "It is kept. " * (number % 13) for number in range(60)]
    forwards = list[list[tuple[int, ...]]]()
    prefill, full = context_prefill.prefill_packed, PromptPrefill.true_kv

    def behind_context(loaded: Any, chunks: Sequence[PackedChunk], prefix: Any) -> Any:
        if any(chunk.context for chunk in chunks):
            forwards.append([chunk.token_ids for chunk in chunks])
        return prefill(loaded, chunks, prefix)

    def in_prompt(self: PromptPrefill, ids: tuple[int, ...], *rest: Any) -> Any:
        forwards.append([ids])
        return full(self, ids, *rest)

    monkeypatch.setattr(context_prefill, "prefill_packed", behind_context)
    monkeypatch.setattr(PromptPrefill, "true_kv", in_prompt)
    options = {"model": str(model), "preprocessing": preprocessing, "memory_bytes": 0, "batch_tokens": 120}
    with FusedKVEngine(**options, kv_dir=tmp_path / "one") as engine:
        engine.build_kv_cache(texts, preprocess="wait", progress=False)
    want, forwards[:] = [*forwards], []
    assert len(want) > 5
    shared = {"remote": f"file://{tmp_path}/shared"}
    actor = PrefillActor({**options, **shared, "kv_dir": str(tmp_path / "actor")}, {})
    facts, report = actor.start(), IngestReport()
    similarity = similarity_of(EngineConfig(**options, kv_dir=tmp_path / "driver"))
    with KVStore(tmp_path / "driver", memory_bytes=0, **shared) as store:
        store.namespaces.add(facts.identity)
        FirstPass(OneActor(actor), store, facts, 120).run(texts, report, progress=False)
        passes = SecondPass(OneActor(actor), store, facts, replace(similarity, search=nearest), 120)
        passes.run(report, refresh=False, progress=False)
    actor.close()
    assert report.chunks_preprocessed == len(texts)
    assert forwards == want
