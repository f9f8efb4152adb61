"""Uses of chunks: when they were, and when they are due to be written."""

from __future__ import annotations

import time
from pathlib import Path

from corpus import SHORT
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.store.uses import UseLog


def test_uses_are_dated_by_the_calendar_and_due_by_the_clock() -> None:
    day_s, now_s = 5e9, 0.0
    uses = UseLog(lambda: day_s, lambda: now_s)
    assert not uses.hit("a", "disk")
    now_s = 9.0
    day_s = 6e9
    assert not uses.hit("a", "memory")
    now_s = 11.0
    assert uses.hit("b", "disk")
    pending, counts = uses.take()
    assert [(use.times, use.used_s) for use in pending.values()] == [(2, 6e9), (1, 6e9)]
    assert counts == {"hits_memory": 1, "hits_disk": 2}
    # From then on they wait anew.
    assert not uses.hit("a", "disk")


def test_standings_say_where_chunks_are_and_how_they_were_used(tmp_path: Path) -> None:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(SHORT[:2], progress=False)
        first, second = map(engine.chunk_id, SHORT[:2])
        rows = engine.store.rows([first])
        assert {(one.tier, one.uses) for one in engine.store.standings([first, second, "0" * 64]).values()} == {
            ("disk", 0)
        }
        for uses, tier in enumerate(("disk", "memory"), 1):
            opened = engine.store.open(first, rows[first].token_ids)
            assert opened is not None
            assert opened.tier == tier
            opened.load_layers(0, opened.num_layers)
            found = engine.store.standings([first, second])
            assert (found[first].tier, found[first].uses, found[second].uses) == ("memory", uses, 0)
            assert abs(found[first].used_s - time.time()) < 60
        engine.store.drop_memory()
        assert engine.store.standings([first])[first].tier == "disk"
