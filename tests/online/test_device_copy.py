"""Copying ahead, without a GPU: what is queued on which stream, in which order, and that the answer stays the same.

The streams are stand-ins that run everything at once and write down what they were asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.kv import ChunkSink
from fused_kv_llm.online import request_kv
from fused_kv_llm.online.device_copy import DeviceChunkFeed

LAYERS = 3


class FakeCuda:
    """Stand-ins for what :class:`DeviceChunkFeed` takes from ``torch.cuda``."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.on_side = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, device: torch.device) -> None: ...

            def wait_stream(self, other: object) -> None:
                fake.log.append(("side waits for computation", None))

        class Computation:
            def wait_event(self, event: Event) -> None:
                fake.log.append(("computation waits for layer", event.layer))

            def wait_stream(self, other: object) -> None:
                fake.log.append(("computation waits for side", None))

        class Event:
            layer: object = None

            def record(self, stream: object) -> None:
                assert fake.on_side
                self.layer = fake.log[-1][1]

        @contextmanager
        def stream(_: object) -> Iterator[None]:
            fake.on_side = True
            yield
            fake.on_side = False

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Computation())
        feed = partial(DeviceChunkFeed, device=torch.device("cpu"))
        monkeypatch.setattr(request_kv, "ChunkFeed", feed)
        place = ChunkSink.place

        def logged(sink: ChunkSink, layer_idx: int) -> None:
            assert self.on_side
            place(sink, layer_idx)
            self.log.append(("placed", layer_idx))

        monkeypatch.setattr(ChunkSink, "place", logged)


@pytest.mark.parametrize(
    ("selector", "tier", "kv_dtype"),
    [
        *itertools.product(["middle_layers", "prophetkv", "prefill_h2o"], ["memory", "disk"], ["auto"]),
        ("boundary", "disk", "int8"),
    ],
)
def test_every_layer_is_waited_for(
    selector: str, tier: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"kv_dtype": kv_dtype, "preprocessing": "none", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        prompt = rag_prompt(SHORT[:3])
        want, report = engine.prefill(prompt, recompute_ratio=0.2, selector=selector)
        if tier == "disk":
            engine.store.drop_memory()
        fake = FakeCuda()
        fake.install(monkeypatch)
        got, again = engine.prefill(prompt, recompute_ratio=0.2, selector=selector)
    assert torch.equal(got.logits, want.logits)
    assert again.reused_tokens == report.reused_tokens
    assert fake.log[0] == ("side waits for computation", None)
    assert fake.log[-1] == ("computation waits for side", None)
    placed = [layer for what, layer in fake.log if what == "placed"]
    waited = [layer for what, layer in fake.log if what == "computation waits for layer"]
    assert sorted(placed) == sorted(waited) == list(range(LAYERS))
    for layer in range(LAYERS):
        assert fake.log.index(("placed", layer)) < fake.log.index(("computation waits for layer", layer))
    assert [what for what, _ in fake.log].count("side waits for computation") == 1


def test_copies_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all chunks in memory, the next layers are queued before the computation asks for them."""
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing="none", store_misses=False
    ) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        prompt = rag_prompt(SHORT[:3])
        engine.prefill(prompt, recompute_ratio=0.0)
        fake = FakeCuda()
        fake.install(monkeypatch)
        engine.prefill(prompt, recompute_ratio=0.0)
    wanted = [("placed", 0), ("computation waits for layer", 0), ("placed", 1), ("placed", 2)]
    assert fake.log[1:5] == wanted
