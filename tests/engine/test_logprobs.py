"""Log-probabilities of an answer's tokens are the model's own; a raw prompt is what the model reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.prompt import RawPrompt

PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "recompute_ratio": 1.0}
    folder = tmp_path_factory.mktemp("logprobs")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as made:
        made.build_kv_cache(SHORT[:3], progress=False)
        yield made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [0, 3])
def test_they_are_those_of_a_forward_pass(engine: FusedKVEngine, temperature: float, count: int) -> None:
    answer = engine.generate(PROMPT, max_tokens=5, temperature=temperature, seed=7, logprobs=count)
    ids = engine.encode(PROMPT) + answer.token_ids
    with torch.inference_mode():
        logits = engine.model(torch.tensor([ids])).logits[0, -len(answer.token_ids) - 1 : -1]
    want = logits.log_softmax(dim=-1)
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    for row, one in zip(want, answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-3)
        assert len(one.top) == count
        for token_id, logprob in one.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        if count:
            assert one.top[0][1] == pytest.approx(float(row.max()), abs=1e-3)


def test_a_constraint_does_not_change_them(engine: FusedKVEngine) -> None:
    free = engine.generate(PROMPT, max_tokens=1, logprobs=1).logprobs[0]

    def only_seven(ids: object, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, float("-inf"))
        masked[7] = logits[7]
        return masked

    held = engine.generate(PROMPT, max_tokens=1, logprobs=1, constraint=only_seven).logprobs[0]
    assert held.token_id == 7
    assert held.logprob < 0
    assert held.top[0][0] == free.top[0][0]


def test_they_come_only_when_asked(engine: FusedKVEngine) -> None:
    assert engine.generate(PROMPT, max_tokens=2).logprobs == []
    for wrong in (-1, 21, 1.5, True):
        with pytest.raises(ConfigError, match="logprobs="):
            engine.submit(PROMPT, logprobs=wrong)  # type: ignore[arg-type]


def test_a_raw_prompt_is_not_rendered(engine: FusedKVEngine) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\nOnce upon"
    assert engine.encode(RawPrompt(text)) == engine.tokenizer(text)["input_ids"]
    ids = engine.tokenizer(text, return_tensors="pt")["input_ids"]
    want = engine.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    assert engine.generate(RawPrompt(text), max_tokens=5).token_ids == want


def test_chunks_are_found_in_a_raw_prompt(engine: FusedKVEngine) -> None:
    report = engine.generate(RawPrompt(PROMPT), max_tokens=1, recompute_ratio=0.3).report
    assert report.chunks_found == 3
