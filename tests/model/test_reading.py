"""Models are read by several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from models import smollm2_tokenizer, tiny_model
from transformers import PreTrainedModel

from fused_kv_llm.model import load_model
from fused_kv_llm.offline import SentenceEmbedder


def test_models_that_are_read_at_once_share_their_weights_as_before(tmp_path: Path) -> None:
    """transformers replaces what all models inherit while it reads one."""
    before = PreTrainedModel.tie_weights
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    smollm2_tokenizer().save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        read = [threads.submit(load_model, str(tmp_path)) for _ in range(6)]
        embedded = [threads.submit(SentenceEmbedder().encode, ["a ferry"]) for _ in range(4)]
        models = [one.result().model for one in read]
        assert len({one.result().tobytes() for one in embedded}) == 1
    assert PreTrainedModel.tie_weights is before
    for model in models:
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert model.lm_head.weight.device == torch.device("cpu")
