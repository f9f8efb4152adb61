"""The store is told what each use of a chunk cost: the share of it that was recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine

TEXTS = [f"Passage {number} is about the number {number}, and about nothing else at all." for number in range(2)]


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 8.0, 64.0), (0.5, 1.2, 8.0)])
def test_a_use_weighs_the_inverse_of_the_share_recomputed(
    tmp_path: Path, ratio: float, least: float, most: float
) -> None:
    options = {"preprocessing": "none", "recompute_ratio": ratio, "selector": "random"}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, **options) as engine:
        engine.build_kv_cache(TEXTS, progress=False)
        _, report = engine.prefill("\n\n".join([*TEXTS, "Which number?"]))
        assert report.chunks_found == 2
        engine.store.stats()
        with engine.store._parts.index._database.connection() as connection:
            found = connection.execute("SELECT hits, reuse FROM places").fetchall()
    for hits, reuse in found:
        assert hits == 2
        assert 1 + least <= reuse <= 1 + most
