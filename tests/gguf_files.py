"""Small GGUF files of random Llama models, written with the ``gguf`` package as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from models import tiny_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def vocabulary() -> list[str]:
    """Tokens of a byte-level tokenizer with two merges and three control tokens."""
    return ["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet()), "th", "the"]


def gguf_model(seed: int = 0, **options: Any) -> PreTrainedModel:
    """Build the random Llama model whose vocabulary is that of the files."""
    return tiny_model("llama", seed=seed, vocab_size=len(vocabulary()), **options)


def write_gguf(path: Path, model: PreTrainedModel, *, architecture: str = "llama", **changed: Any) -> Path:
    """Write a model and the tokenizer of :func:`vocabulary`.

    Parameters
    ----------
    path : Path
    model : PreTrainedModel
    architecture : str
    changed : object
        Settings, with ``__`` for the dots of their names, or tensors; None leaves one out.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    settings = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    tensors = {_gguf_name(name): _gguf_weights(name, weights, config) for name, weights in model.state_dict().items()}
    for name, value in changed.items():
        (tensors if isinstance(value, np.ndarray) or "weight" in name else settings)[name.replace("__", ".")] = value
    writer.add_name("tiny")
    for name, value in settings.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
        if add is not None:
            add(f"{architecture}.{name}", value)
    _add_tokenizer(writer)
    for name, weights in tensors.items():
        if weights is not None:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    control = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([control] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _gguf_weights(name: str, weights: torch.Tensor, config: Any) -> np.ndarray[Any, Any]:
    """Return weights as llama.cpp has them: the two halves of each head's queries and keys interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            rows = weights.shape[0] // count // 2
            weights = weights.view(count, 2, rows, -1).swapaxes(1, 2).reshape(weights.shape)
    return np.asarray(weights.float().numpy())
