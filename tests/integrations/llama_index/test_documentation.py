"""The examples in the docstrings run as they are."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

import llama_index_fused_kv
from llama_index_fused_kv import indices, llms

SURFACE = [
    "FusedKVIndex",
    "FusedKVLLM",
    "FusedKVPostprocessor",
    "FusedKVRetriever",
    "FusedKVTransform",
    "QuickFirstRetriever",
    "StagedFaissRetriever",
    "build_kv_cache",
    "compact_prompt",
]


@pytest.mark.parametrize("module", [llama_index_fused_kv, indices, llms], ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_surface_is_pinned() -> None:
    assert sorted(llama_index_fused_kv.__all__) == SURFACE
