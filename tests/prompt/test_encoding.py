"""Encoders: made once for a tokenizer as it is, and gone with it."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from fused_kv_llm.errors import PromptError
from fused_kv_llm.prompt.encoding import token_encoder

STAND_INS = "".join(map(chr, range(0x104000, 0x10FFFE)))


@pytest.fixture
def own(byte_level: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return copy.deepcopy(byte_level)


def test_an_unchanged_tokenizer_has_one_encoder(own: PreTrainedTokenizerFast) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: token_encoder(own), range(8)))
    assert len(set(map(id, made))) == 1


def test_a_changed_tokenizer_has_another_one(own: PreTrainedTokenizerFast) -> None:
    before = token_encoder(own)
    own.add_tokens(["<|sail|>"], special_tokens=True)
    after = token_encoder(own)
    assert before.control_spans("a <|sail|>") == []
    assert after.control_spans("a <|sail|>") == [(2, 10)]


def test_other_options_have_another_one(own: PreTrainedTokenizerFast) -> None:
    own.add_tokens(["<think>"])
    plain, templated = token_encoder(own), token_encoder(own, "{{ '<think>' }}")
    assert (plain.control_spans("<think>"), templated.control_spans("<think>")) == ([], [(0, 7)])
    text = "<|eot|>"
    whole = token_encoder(own).encode(text, add_special_tokens=False).ids
    own.split_special_tokens = True
    assert len(token_encoder(own).encode(text, add_special_tokens=False).ids) > len(whole) == 1


def test_it_is_gone_with_its_tokenizer(own: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(own)
    encoder = weakref.ref(token_encoder(tokenizer))
    assert encoder() is not None
    del tokenizer
    gc.collect()
    assert encoder() is None


def test_a_text_with_its_stand_ins_is_refused(own: PreTrainedTokenizerFast) -> None:
    encoder = token_encoder(own)
    with pytest.raises(PromptError, match="private-use characters"):
        encoder.encode_plain(next(iter(encoder._stand_ins.values())))
    # Others of these characters are ordinary text.
    others = [char for char in STAND_INS[::5000] if not encoder._stand_in_start.search(char)]
    assert encoder.encode_plain("".join(others))
