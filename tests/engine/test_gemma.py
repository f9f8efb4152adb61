"""A second real model: Gemma 3 270M from GGUF, with windows of 512 tokens, two rotations, and no chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_models import gemma, plain_gemma
from torch import Tensor

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.decoding import end_token_ids
from fused_kv_llm.demo import handbook_passages
from fused_kv_llm.errors import ConfigError, PromptError
from fused_kv_llm.online import view_of
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import QCFUSE, Selector, SinkAttention

pytestmark = [pytest.mark.real_model, pytest.mark.heavy]

PASSAGES = handbook_passages()[:6]
# Longer than a window, in one piece.
LONG = "\n".join(handbook_passages()[6:10])
QUESTION = "\n\nQuestion: What do the passages speak of?\nAnswer:"
PROMPT = "Context:\n" + "\n\n".join(PASSAGES) + QUESTION
START = "One, two, three, four,"
TEXT = (
    "The sun rises in the east and sets in the west. In the morning the people of the village go to the fields, and in "
    "the evening they come back to their houses. The children go to school, where they learn to read and to write."
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    with FusedKVEngine(gemma(), kv_dir=tmp_path_factory.mktemp("kv"), preprocessing="none") as made:
        made.build_kv_cache([*PASSAGES, LONG], progress=False)
        yield made


def plain_logits(ids: list[int]) -> Tensor:
    """Return plain transformers' logits of the last token, ``[vocabulary]``."""
    with torch.inference_mode():
        found: Tensor = plain_gemma()(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
    return found


def plain_answer(engine: FusedKVEngine, prompt: str, max_tokens: int) -> str:
    """Return what plain transformers answers greedily."""
    ids = torch.tensor([engine.encode(prompt)])
    with torch.inference_mode():
        answer = plain_gemma().generate(ids, max_new_tokens=max_tokens, do_sample=False)[0, ids.shape[1] :]
    return str(engine.tokenizer.decode(answer, skip_special_tokens=True))


def logits(engine: FusedKVEngine, prompt: str, ratio: float) -> tuple[Tensor, Any]:
    fused, report = engine.prefill(prompt, recompute_ratio=ratio)
    fused.cache.release()
    return fused.logits, report


def test_its_configuration_is_that_of_the_model() -> None:
    config = gemma().model.config
    assert (config.model_type, config.sliding_window, config.query_pre_attn_scalar) == ("gemma3_text", 512, 256)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (18, 1, 256)
    assert [number for number, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    thetas = {kind: parameters["rope_theta"] for kind, parameters in config.rope_parameters.items()}
    assert thetas == {"full_attention": 1e6, "sliding_attention": 1e4}
    assert config.rms_norm_eps == pytest.approx(1e-6)
    assert gemma().geometry.global_layers == (5, 11, 17)
    assert gemma().model_id.endswith(".gguf")


@pytest.mark.parametrize("shift_name", [None, "shift"])
@pytest.mark.parametrize(("selector", "warnings"), [(SinkAttention(), 0), (QCFUSE, 1)], ids=["default", "qcfuse"])
def test_two_layers_without_a_window_choose(selector: Selector, warnings: int, shift_name: str | None) -> None:
    report = FusionReport()
    view = view_of(selector, gemma(), shift_name, report)
    assert view.layers == (5, 11)
    assert len(report.warnings) == warnings
    assert all("layers (5, 11) stand in" in warning for warning in report.warnings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_english_is_likely(dtype: torch.dtype) -> None:
    """Norm weights without the 1 that GGUF adds, or heads in another order, would make nonsense of it."""
    import copy

    model = plain_gemma() if dtype == torch.float32 else copy.deepcopy(plain_gemma()).to(dtype)
    ids = torch.tensor([gemma().tokenizer(TEXT).input_ids])
    with torch.inference_mode():
        assert float(model(ids, labels=ids).loss.exp()) < 12


def test_ids_are_the_tokenizers_own(engine: FusedKVEngine) -> None:
    """The beginning-of-text token comes before a prompt, once, and is what chunks are prefilled after."""
    tokenizer = engine.tokenizer
    assert tokenizer.chat_template is None
    assert engine.encode(PROMPT) == tokenizer(PROMPT).input_ids
    assert engine.encode(PROMPT).count(tokenizer.bos_token_id) == 1
    assert engine.renderer.header_ids == engine.renderer.prefix_ids == [tokenizer.bos_token_id]
    assert end_token_ids(engine.loaded) == {tokenizer.eos_token_id} == {1}


def test_ratio_one_is_plain_transformers(engine: FusedKVEngine) -> None:
    ids = engine.encode(PROMPT)
    assert len(ids) > 800, "a window of 512 tokens is to matter"
    found, report = logits(engine, PROMPT, 1.0)
    assert report.chunks_found == 6
    torch.testing.assert_close(found, plain_logits(ids), atol=1e-4, rtol=1e-4)


def test_greedy_tokens_are_those_of_plain_transformers(engine: FusedKVEngine) -> None:
    found = engine.generate(PROMPT, max_tokens=12, recompute_ratio=1.0)
    assert found.text == plain_answer(engine, PROMPT, 12)


def test_a_chunk_longer_than_a_window_is_exact_where_it_was_prefilled(engine: FusedKVEngine) -> None:
    prompt = LONG + QUESTION
    found, report = logits(engine, prompt, 0.0)
    assert report.reused_tokens > 600
    assert report.recomputed_tokens == 0
    torch.testing.assert_close(found, plain_logits(engine.encode(prompt)), atol=1e-4, rtol=1e-4)


def test_moved_chunks_come_close_and_recomputation_brings_them_closer(engine: FusedKVEngine) -> None:
    """The first chunk stands where it was prefilled, five others are moved: by two rotations, in windows and without.

    Without the right rotation in every layer, full reuse is worse than the bound.
    """
    wanted = torch.log_softmax(plain_logits(engine.encode(PROMPT)), -1)
    losses = []
    for ratio in (0.0, 0.3):
        found, report = logits(engine, PROMPT, ratio)
        assert report.reused_tokens + report.recomputed_tokens > 800
        losses.append(float((wanted.exp() * (wanted - torch.log_softmax(found, -1))).sum()))
    assert losses[1] < losses[0] < 0.4


def test_it_answers_through_langchain(engine: FusedKVEngine) -> None:
    from langchain_fused_kv import ChatFusedKV, FusedKVLLM

    llm = FusedKVLLM.from_engine(engine, max_tokens=8)
    assert llm.invoke(START) == plain_answer(engine, START, 8)
    llm.invoke(PROMPT)
    assert llm.last_report.chunks_found == 6
    assert llm.last_report.reused_tokens > 600
    assert "\n" not in llm.bind(stop=["\n"], max_tokens=40).invoke("One line:\n\nThe sun").rstrip()
    with pytest.raises(ConfigError, match=r"has no chat template.*FusedKVLLM"):
        ChatFusedKV.from_engine(engine).invoke("Hello")


def test_it_answers_through_llama_index(engine: FusedKVEngine) -> None:
    from llama_index_fused_kv import FusedKVLLM

    llm = FusedKVLLM.from_engine(engine, max_tokens=8)
    assert not llm.metadata.is_chat_model
    assert llm.complete(START).text == plain_answer(engine, START, 8)


def test_messages_need_a_template(engine: FusedKVEngine) -> None:
    with pytest.raises(PromptError, match="need a chat template and this tokenizer has none"):
        engine.generate([{"role": "user", "content": "Hello"}], max_tokens=1)
