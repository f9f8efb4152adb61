"""An encoder is made once for a tokenizer as it is, and gone with it."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import PreTrainedTokenizerFast

from fused_kv_llm.prompt.shared_encoder import shared_encoder


@pytest.fixture
def own(byte_level: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return copy.deepcopy(byte_level)


def test_an_unchanged_tokenizer_has_one_encoder(own: PreTrainedTokenizerFast) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: shared_encoder(own), range(8)))
    assert len(set(map(id, made))) == 1


def test_a_changed_tokenizer_has_another_one(own: PreTrainedTokenizerFast) -> None:
    before = shared_encoder(own)
    own.add_tokens(["<|sail|>"], special_tokens=True)
    after = shared_encoder(own)
    assert before.control_spans("a <|sail|>") == []
    assert after.control_spans("a <|sail|>") == [(2, 10)]


def test_other_options_have_another_one(own: PreTrainedTokenizerFast) -> None:
    own.add_tokens(["<think>"])
    plain, templated = shared_encoder(own), shared_encoder(own, "{{ '<think>' }}")
    assert (plain.control_spans("<think>"), templated.control_spans("<think>")) == ([], [(0, 7)])
    text = "<|eot|>"
    whole = shared_encoder(own).encode(text, add_special_tokens=False).ids
    own.split_special_tokens = True
    assert len(shared_encoder(own).encode(text, add_special_tokens=False).ids) > len(whole) == 1


def test_it_is_gone_with_its_tokenizer(own: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(own)
    encoder = weakref.ref(shared_encoder(tokenizer))
    assert encoder() is not None
    del tokenizer
    gc.collect()
    assert encoder() is None
