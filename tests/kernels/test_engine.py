"""The whole engine on Triton's kernels, interpreted: what a GPU would run, on a tiny model."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import rag_prompt
from models import tiny_model
from random_model import random_words, word_tokenizer
from tolerance import LOGITS, assert_near

import fused_kv_kernels
import fused_kv_llm
from fused_kv_kernels import dispatch
from fused_kv_llm import FusedKVEngine

# No package has to be there that carries a tokenizer: this runs on whatever machine has the device.
CHUNKS = [random_words(40, 500, seed) for seed in (1, 2, 3)]
NEIGHBOURS = {text: [other for other in CHUNKS if other != text] for text in CHUNKS}
PLACING = {"place_chunks", "row_attention"}
SHIFTING = {"shift_chunks", "transfer"}
# What a request runs, by selector and preprocessing.
REQUESTS = {
    ("middle_layers", "none"): PLACING | {"token_scores"},
    ("cacheblend", "none"): PLACING | {"kv_deviation"},
    ("sink_attention", "similar"): PLACING | {"token_scores"} | SHIFTING,
}
INGESTION = {"none": {"row_attention"}, "similar": {"row_attention", "rotate"}}


def operators_of_the_engine() -> set[str]:
    """Return the modules of ``fused_kv_kernels`` that have a kernel and that the engine's source imports from."""
    found = set()
    for path in Path(fused_kv_llm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "fused_kv_kernels":
                found |= {getattr(fused_kv_kernels, alias.name) for alias in node.names}
    modules = {operator.__module__ for operator in found if callable(operator)}
    return {module.rpartition(".")[2] for module in modules if hasattr(sys.modules[module], "triton_op")}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect the modules whose kernels are called."""
    called: set[str] = set()

    def recording(module: str) -> Any:
        def triton_op(name: str, device: torch.device) -> Any:
            called.add(module)
            return dispatch.triton_op(name, device)

        return triton_op

    for module in operators_of_the_engine():
        monkeypatch.setattr(sys.modules[f"fused_kv_kernels.{module}"], "triton_op", recording(module))
    return called


def test_every_operator_of_the_engine_is_among_those_that_are_run() -> None:
    assert set().union(*REQUESTS.values(), *INGESTION.values()) == operators_of_the_engine()


@pytest.mark.heavy
@pytest.mark.parametrize(("preprocessing", "kv_dtype"), [("none", "auto"), ("none", "int8"), ("similar", "auto")])
def test_triton_gives_the_logits_of_torch(
    preprocessing: str,
    kv_dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    run: set[str],
) -> None:
    """Chunks that Triton ingests, and prompts that it fuses, against the same in torch."""
    model = tiny_model().to(device)
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "preprocessing": preprocessing, "store_misses": False}

    def engine(folder: str) -> FusedKVEngine:
        made = FusedKVEngine(model, tokenizer=word_tokenizer(500), kv_dir=tmp_path / folder, **options)
        # The checks at loading move keys.
        run.clear()
        made.build_kv_cache(CHUNKS, neighbours=NEIGHBOURS, preprocess="wait", progress=False)
        return made

    with engine("triton") as ingested:
        assert run == INGESTION[preprocessing]
        monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
        run.clear()
        prompt = rag_prompt(CHUNKS, random_words(20, 500, 3))
        with engine("torch") as plain:
            for (selector, prepared), operators in REQUESTS.items():
                if prepared != preprocessing:
                    continue
                monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
                want, report = plain.prefill(prompt, recompute_ratio=0.3, selector=selector)
                assert report.recomputed_tokens > 5
                assert not run
                monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
                got, _ = ingested.prefill(prompt, recompute_ratio=0.3, selector=selector)
                assert run == operators
                run.clear()
                assert torch.equal(got.selected, want.selected)
                assert_near(got.logits, want.logits, torch.float32, LOGITS)
