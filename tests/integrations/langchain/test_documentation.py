"""The examples in the docstrings run as they are."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

import langchain_fused_kv
from fused_kv_llm.adapter import model, retrieval_log
from langchain_fused_kv import chat_models, llms, retrievers


@pytest.mark.parametrize(
    "module",
    [langchain_fused_kv, model, retrieval_log, chat_models, llms, retrievers],
    ids=lambda module: module.__name__,
)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
