"""Numbers in a prompt's chunks, as selectors are told of them."""

from __future__ import annotations

from pathlib import Path

from corpus import rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.online import Recipe
from fused_kv_llm.online.selection import describe_chunks
from fused_kv_llm.selectors import resolve_selector


def test_a_number_ends_where_its_chunk_does(tmp_path: Path) -> None:
    texts = ["The ferry from the old harbour carries 12", "34 boxes stand on the quay of the island today."]
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing="none") as engine:
        engine.build_kv_cache(texts, progress=False)
        prompt = rag_prompt(["".join(texts)])
        with engine.requests.planner.plan(prompt, FusionReport()) as request:
            known = describe_chunks(request, Recipe(resolve_selector("sink_attention"), 0.15))
            tokens = [engine.tokenizer.decode([request.ids[position]]) for position in known.positions.tolist()]
    assert known.numbers is not None
    numbers = known.numbers.tolist()
    of = {token: numbers[tokens.index(token)] for token in ("1", "2", "3", "4")}
    assert known.chunk_index.unique().tolist() == [0, 1]
    assert of["1"] == of["2"] != of["3"] == of["4"]
    assert min(of.values()) >= 0
    assert numbers[tokens.index(" ferry")] == -1
