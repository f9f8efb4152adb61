"""The password of a remote tier's URL is in nothing that the framework objects show, write down or send."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumps
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm.errors import ConfigError
from langchain_fused_kv import ChatFusedKV
from langchain_fused_kv import FusedKVLLM as LangChainLLM
from llama_index_fused_kv import FusedKVLLM as LlamaIndexLLM

pytest.importorskip("fsspec")
URL, PASSWORD = "memory://user:hunter2@bucket/kv", "hunter2"
MODELS = [LangChainLLM, ChatFusedKV, LlamaIndexLLM]


@pytest.fixture(name="options")
def _options(tmp_path: Path) -> dict[str, Any]:
    return {"model": tiny_model(), "tokenizer": smollm2_tokenizer(), "kv_dir": tmp_path, "preprocessing": "none"}


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_not_shown_and_not_serialised(kind: Any, options: dict[str, Any]) -> None:
    with kind(**options, remote=URL) as llm:
        assert llm.remote == URL
        shown = [
            repr(llm), str(llm), str(llm.model_dump(exclude={"model", "tokenizer"})),
            llm.model_dump_json(exclude={"model", "tokenizer"}, fallback=str), repr(llm.engine), repr(llm.runtime),
            str(list(llm.__repr_args__())),
        ]  # fmt: skip
        if kind is LlamaIndexLLM:
            shown.append(str(llm.to_dict()))
        else:
            shown += [dumps(llm), str(llm.asdict()), str(llm._identifying_params), str(llm._get_ls_params())]
        assert all(PASSWORD not in text for text in shown)
        assert llm.model_dump(exclude={"model", "tokenizer"})["remote"] == "memory://bucket/kv"
        # A copy has it: it is the same object for the engine.
        assert llm.model_copy().remote == URL
        with pytest.raises(ConfigError, match="remote cannot change") as caught:
            llm.remote = "memory://:hunter2@elsewhere"
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "wrong",
    [{"remote": ["redis://:hunter2@host"]}, {"remot": "redis://:hunter2@host"}, {"remote": URL, "max_tokens": 0}],
)
def test_it_is_not_in_errors(kind: Any, options: dict[str, Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**options, **wrong)
    told = "".join(traceback.format_exception_only(caught.value))
    told += "".join(traceback.format_exception_only(caught.value.__cause__)) if caught.value.__cause__ else ""
    assert PASSWORD not in told
    assert next(iter(wrong)) in told or "max_tokens" in told


def test_errors_cross_processes(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LangChainLLM(**options, remote=":hunter2@host")
    assert PASSWORD not in str(pickle.loads(pickle.dumps(caught.value)))
