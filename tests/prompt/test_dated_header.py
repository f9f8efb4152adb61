"""A template that prints the date must not make yesterday's chunks useless."""

from __future__ import annotations

import copy

import pytest
from models import smollm2_tokenizer

from fused_kv_llm.prompt import PromptRenderer

TEMPLATES = {
    "llama3.2": ("{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"),
    "direct": "{% set date_string = strftime_now('%d %b %Y') %}",
}
BODY = (
    "<|im_start|>system\nToday is {{ date_string }}.<|im_end|>\n<|im_start|>user\n"
    "{{ messages[0]['content'] }}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_header_of_the_chunks_carries_a_fixed_date(name: str) -> None:
    tokenizer = copy.deepcopy(smollm2_tokenizer())
    tokenizer.chat_template = TEMPLATES[name] + BODY
    renderer = PromptRenderer(tokenizer)
    assert "01 Jan 2025" in tokenizer.decode(renderer.header_ids)
    prompt = renderer.render("Hello there").text
    assert "01 Jan 2025" not in prompt
    vanilla = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello there"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == vanilla


def test_the_header_is_the_beginning_of_ordinary_prompts() -> None:
    renderer = PromptRenderer(smollm2_tokenizer())
    ids = renderer.encode(renderer.render("Passengers may board.")).ids
    assert list(ids[: len(renderer.header_ids)]) == renderer.header_ids
    assert renderer.prefix_ids == renderer.header_ids[: len(renderer.prefix_ids)]
