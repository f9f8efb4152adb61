"""Random models and prompts of any size: time depends on neither weights nor words, and nothing has to be fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_kv_llm import FusedKVEngine

__all__ = ["SHAPE_7B", "SHAPE_TOY", "Prompt", "build_model", "random_words", "word_tokenizer"]

CHUNK_WORDS = 512
QUESTION_WORDS = 32
SHAPE_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
SHAPE_TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def word_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words ``w0`` ... are one token each."""
    vocabulary = {"<end>": 0, "<unknown>": 1} | {f"w{i}": i + 2 for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>")


def random_words(count: int, words: int, seed: int) -> str:
    """Return that many random words."""
    drawn = torch.randint(words, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{word}" for word in drawn)


def build_model(shape: dict[str, int], vocabulary: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a randomly initialised model, made where it is used."""
    config = Qwen2Config(**shape, vocab_size=vocabulary, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
                         tie_word_embeddings=False, eos_token_id=0, pad_token_id=0)  # fmt: skip
    with device:
        torch.set_default_dtype(dtype)
        try:
            return Qwen2ForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of one length whose chunks are in the engine's store."""

    engine: FusedKVEngine
    text: str
    ids: list[int]

    @classmethod
    def ingested(cls, engine: FusedKVEngine, length: int, words: int) -> Prompt:
        """Make one of random words, and ingest its chunks."""
        chunks = [random_words(CHUNK_WORDS, words, seed) for seed in range(length // CHUNK_WORDS)]
        engine.build_kv_cache(chunks, preprocess="wait")
        text = "\n".join([*chunks, random_words(QUESTION_WORDS, words, 10**6 + length)])
        return cls(engine, text, engine.encode(text))

    def fused(self, room: int) -> Any:
        """Return the prompt fused with nothing recomputed, and room for so many tokens."""
        return self.engine.prefill(self.text, recompute_ratio=0.0, max_tokens=room)[0]
