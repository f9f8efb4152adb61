"""FusedKVLLM with a real model: answers, options, streams, LangChain's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import ConfigurableField

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError, FusedKVError
from fused_kv_llm.tuning.baseline import full_prefill
from langchain_fused_kv import FusedKVLLM


class _Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.results: list[Any] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.results.append(response)


def test_invoke_returns_the_engines_answer_without_the_prompt(llm: FusedKVLLM, prompts: list[str]) -> None:
    answer = llm.invoke(prompts[0])
    assert answer == llm.engine.generate(prompts[0], max_tokens=12).text
    assert prompts[0][:40] not in answer


def test_ratio_one_is_the_plain_model_on_the_same_ids(llm: FusedKVLLM, prompts: list[str]) -> None:
    plain = full_prefill(llm.engine, prompts[1], max_tokens=12)
    assert llm.bind(recompute_ratio=1.0).invoke(prompts[1]) == plain.text
    wrapped = llm.engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompts[1]}], add_generation_prompt=True, return_dict=False
    )
    assert plain.prompt_tokens == len(wrapped)


def test_stored_chunks_are_reused(llm: FusedKVLLM, prompts: list[str]) -> None:
    llm.invoke(prompts[0])
    report = llm.last_report
    assert report is not None
    assert report.chunks_found == 2
    assert report.reused_tokens > report.recomputed_tokens > 0
    assert report.prompt_tokens == report.cached_tokens + report.computed_tokens


def test_several_prompts_give_one_result_with_info_per_generation(llm: FusedKVLLM, prompts: list[str]) -> None:
    result = llm.generate(prompts[:2])
    infos = [generations[0].generation_info for generations in result.generations]
    assert [info["fused_kv"]["chunks_found"] for info in infos if info] == [2, 2]
    assert {info["finish_reason"] for info in infos if info} <= {"stop", "length"}
    assert result.llm_output is not None
    total = sum(info["token_usage"]["total_tokens"] for info in infos if info)
    assert result.llm_output["token_usage"]["total_tokens"] == total


def test_stream_yields_the_same_text_and_ends_with_the_report(llm: FusedKVLLM, prompts: list[str]) -> None:
    recorder = _Recorder()
    pieces = list(llm.stream(prompts[0], config={"callbacks": [recorder]}))
    assert len(pieces) > 3
    assert "".join(pieces) == llm.invoke(prompts[0])
    assert recorder.tokens == pieces
    (generation,) = recorder.results[0].generations[0]
    assert generation.generation_info["fused_kv"]["chunks_found"] == 2
    usage = generation.generation_info["token_usage"]
    assert usage["completion_tokens"] == len(pieces)
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


def test_nothing_is_held_between_pieces(llm: FusedKVLLM, prompts: list[str]) -> None:
    stream = llm.stream(prompts[0])
    first = next(stream)
    assert not torch.is_inference_mode_enabled()
    other = llm.stream(prompts[1])
    interleaved = [first, *(piece for pair in zip(stream, other, strict=False) for piece in pair[:1])]
    assert llm.invoke(prompts[0]).startswith("".join(interleaved[:4]))


def test_an_abandoned_stream_blocks_nobody(llm: FusedKVLLM, prompts: list[str]) -> None:
    abandoned = llm.stream(prompts[0])
    next(abandoned)
    assert llm.invoke(prompts[1])
    abandoned.close()
    assert llm.invoke(prompts[1])


@pytest.mark.parametrize("where", ["constructor", "call", "bind"])
def test_stop_strings_end_the_answer(engine: FusedKVEngine, prompts: list[str], where: str) -> None:
    whole = FusedKVLLM.from_engine(engine, max_tokens=12).invoke(prompts[0])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    expected = whole[: whole.index(stop)]
    llm = FusedKVLLM.from_engine(engine, max_tokens=12, stop=[stop] if where == "constructor" else None)
    if where == "bind":
        assert llm.bind(stop=[stop]).invoke(prompts[0]) == expected
    else:
        stops = {"stop": [stop]} if where == "call" else {}
        assert llm.invoke(prompts[0], **stops) == expected
        assert "".join(llm.stream(prompts[0], **stops)) == expected


def test_stop_strings_of_call_and_constructor_both_count(engine: FusedKVEngine, prompts: list[str]) -> None:
    whole = FusedKVLLM.from_engine(engine, max_tokens=12).invoke(prompts[0])
    early, late = whole[3:6], whole[9:12]
    assert whole.index(early) < whole.index(late)
    llm = FusedKVLLM.from_engine(engine, max_tokens=12, stop=[early])
    assert llm.invoke(prompts[0], stop=[late]) == whole[: whole.index(early)]
    llm.stop = [late]
    assert llm.invoke(prompts[0], stop=[early]) == whole[: whole.index(early)]


def test_options_of_a_call_override_those_of_the_object(llm: FusedKVLLM, prompts: list[str]) -> None:
    bound = llm.bind(recompute_ratio=0.5, max_tokens=3)
    bound.invoke(prompts[0])
    assert llm.last_report is not None
    assert (llm.last_report.recompute_ratio, llm.last_report.completion_tokens) == (0.5, 3)
    list(bound.stream(prompts[0]))
    assert (llm.last_report.recompute_ratio, llm.last_report.completion_tokens) == (0.5, 3)
    assert (llm.recompute_ratio, llm.max_tokens) == (0.15, 12)


def test_a_seed_makes_sampling_repeatable(llm: FusedKVLLM, prompts: list[str]) -> None:
    sampling = llm.bind(temperature=1.5, seed=7)
    assert sampling.invoke(prompts[0]) == sampling.invoke(prompts[0])
    assert len({llm.invoke(prompts[0], temperature=1.5, seed=seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_ration": 0.5}, "did you mean 'recompute_ratio'"),
        ({"pipeline_kwargs": {}}, "has no option 'pipeline_kwargs'"),
        ({"recompute_ratio": 1.5}, "recompute_ratio=1.5"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"engine": object()}, "from_engine"),
        ({"selector": "best"}, "selector='best'"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + message.replace(".", r"\.")):
        FusedKVLLM(kv_dir=tmp_path / "kv", **options)


def test_options_of_a_call_are_checked(llm: FusedKVLLM) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens cannot be set"):
        llm.invoke("Hello", max_new_tokens=3)
    with pytest.raises(ConfigError, match="recompute_ratio=2"):
        llm.bind(recompute_ratio=2).invoke("Hello")


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FusedKVError, match="no-such-model"):
        FusedKVLLM(model=str(tmp_path / "no-such-model"), kv_dir=tmp_path / "kv")


def test_what_belongs_to_a_shared_engine_cannot_be_set_again(engine: FusedKVEngine) -> None:
    with pytest.raises(ConfigError, match="kv_dir"):
        FusedKVLLM.from_engine(engine, kv_dir="elsewhere")


def test_configurable_fields_share_the_engine(llm: FusedKVLLM, prompts: list[str]) -> None:
    ratio = ConfigurableField(id="ratio")
    chain = llm.configurable_fields(recompute_ratio=ratio)
    chain.invoke(prompts[0], config={"configurable": {"ratio": 0.5}})
    assert llm.last_report is not None
    assert llm.last_report.recompute_ratio == 0.5
    tenants = llm.configurable_fields(tenant=ConfigurableField(id="tenant"))
    with pytest.raises(ConfigError, match="tenant cannot change"):
        tenants.invoke(prompts[0], config={"configurable": {"tenant": "other"}})


def test_the_cache_keeps_ratios_apart(engine: FusedKVEngine, prompts: list[str]) -> None:
    cache = InMemoryCache()
    low = FusedKVLLM.from_engine(engine, cache=cache, max_tokens=4, recompute_ratio=0.15)
    high = FusedKVLLM.from_engine(engine, cache=cache, max_tokens=4, recompute_ratio=0.5)
    low.invoke(prompts[0])
    high.invoke(prompts[0])
    assert high.last_report is not None
    assert high.last_report.recompute_ratio == 0.5
    before = low.last_report
    low.invoke(prompts[0])
    assert low.last_report is before


@pytest.mark.parametrize("options", [{"recompute_ratio": 0.5}, {"max_tokens": 3}, {"seed": 1}, {"selector": "random"}])
def test_the_cache_keeps_options_of_a_call_apart(
    engine: FusedKVEngine, prompts: list[str], options: dict[str, Any]
) -> None:
    llm = FusedKVLLM.from_engine(engine, cache=InMemoryCache(), max_tokens=4)
    llm.invoke(prompts[0])
    first = llm.last_report
    llm.bind(**options).invoke(prompts[0])
    second = llm.last_report
    assert second is not first
    llm.bind(**options).invoke(prompts[0])
    llm.invoke(prompts[0])
    assert llm.last_report is second


async def _ask(llm: Any, prompt: str) -> str:
    return str(await llm.ainvoke(prompt))


def test_the_cache_keeps_options_of_an_asynchronous_call_apart(engine: FusedKVEngine, prompts: list[str]) -> None:
    import asyncio

    llm = FusedKVLLM.from_engine(engine, cache=InMemoryCache(), max_tokens=4)
    asyncio.run(_ask(llm, prompts[0]))
    first = llm.last_report
    asyncio.run(_ask(llm.bind(recompute_ratio=0.5), prompts[0]))
    assert llm.last_report is not first


def test_the_cache_keeps_the_stop_strings_of_constructors_apart(engine: FusedKVEngine, prompts: list[str]) -> None:
    cache = InMemoryCache()
    plain = FusedKVLLM.from_engine(engine, cache=cache, max_tokens=12)
    whole = plain.invoke(prompts[0])
    stopping = FusedKVLLM.from_engine(engine, cache=cache, max_tokens=12, stop=[whole[6:9]])
    assert stopping.invoke(prompts[0]) == whole[: whole.index(whole[6:9])]


def test_identity_names_model_store_and_tenant(llm: FusedKVLLM) -> None:
    params = llm._identifying_params
    assert params["model"] == "smollm2-135m"
    assert params["model_fingerprint"] == llm.engine.model_fingerprint
    assert {"kv_dir", "tenant", "dtype", "wrap_chat_template", "selector", "default_stop"} <= set(params)


def test_tokens_are_counted_with_the_models_tokenizer(llm: FusedKVLLM) -> None:
    text = "Das Schiff fährt um 9:15 Uhr ab. 🚢"
    assert llm.get_token_ids(text) == llm.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert llm.get_num_tokens(text) == len(llm.get_token_ids(text))


def test_documents_and_strings_are_ingested(engine: FusedKVEngine) -> None:
    llm = FusedKVLLM.from_engine(engine)
    text = "The café on the upper deck of the Mizar closes twenty minutes before each arrival in harbour."
    report = llm.build_kv_cache([Document(text), text], progress=False)
    assert (report.chunks_new + report.chunks_present, report.chunks_duplicate) == (1, 1)
    assert llm.prefetch([text])[0] == engine.chunk_id(text) is not None


@pytest.mark.parametrize("wrong", ["one string", [3], [None], Document("a document")])
def test_what_is_not_a_list_of_texts_is_refused(llm: FusedKVLLM, wrong: Any) -> None:
    with pytest.raises(CorpusError):
        llm.build_kv_cache(wrong, progress=False)
