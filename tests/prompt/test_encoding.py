"""Stand-ins for control tokens: private-use characters that no text may have."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from fused_kv_llm.errors import PromptError
from fused_kv_llm.prompt.shared_encoder import shared_encoder


def test_a_text_with_a_stand_in_is_refused(byte_level: PreTrainedTokenizerFast) -> None:
    encoder = shared_encoder(byte_level)
    with pytest.raises(PromptError, match="private-use characters"):
        encoder.encode_plain(next(iter(encoder._stand_ins.values())))
    others = [char for char in map(chr, range(0x104000, 0x10FFFE, 5000)) if not encoder._stand_in_start.search(char)]
    assert encoder.encode_plain("".join(others)), "other private-use characters are ordinary text"
