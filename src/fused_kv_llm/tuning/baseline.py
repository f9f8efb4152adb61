"""The same prompt through plain transformers: what the engine is compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fused_kv_llm.decoding import TextStream, end_token_ids
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError

__all__ = ["BaselineRun", "full_prefill"]


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """One answer of the plain model.

    Parameters
    ----------
    text : str
    token_ids : list of int
        Generated tokens, without the end token; those of a stop string are among them.
    prompt_tokens : int
        Tokens prefilled.
    ttft_s : float
        Seconds from the call to the first token, tokenisation included.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    ttft_s: float


def full_prefill(
    engine: FusedKVEngine,
    prompt: str | Sequence[dict[str, Any]],
    *,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
) -> BaselineRun:
    """Answer greedily with the engine's model but without any stored KV.

    The token ids, the dtype and the device are the engine's; attention is transformers' own SDPA. No other
    thread may use the engine meanwhile.

    Parameters
    ----------
    engine : FusedKVEngine
    prompt : str or list of messages
        Rendered as the engine renders it.
    max_tokens : int
        Tokens to generate at most.
    stop : sequence of str
        The answer ends before the first of these strings.

    Returns
    -------
    BaselineRun

    Raises
    ------
    ConfigError
        If `max_tokens` is less than 1.
    """
    if max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} is less than 1")
    ends = end_token_ids(engine.loaded)
    # Ingestion that goes on in the background would slow this run and not the one it is compared with.
    engine.wait_for_background()
    with engine.model_lock, _sdpa(engine.model) as model, torch.inference_mode():
        started = time.perf_counter()
        ids = engine.encode(prompt)
        output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=True, logits_to_keep=1)
        token = int(output.logits[0, -1].argmax())
        ttft_s = time.perf_counter() - started
        generated: list[int] = []
        stream, text = TextStream(engine.tokenizer, tuple(stop)), ""
        while token not in ends:
            generated.append(token)
            text += stream.push(token)
            if stream.stopped or len(generated) == max_tokens:
                break
            output = model(
                input_ids=torch.tensor([[token]], device=model.device),
                past_key_values=output.past_key_values,
                use_cache=True,
            )
            token = int(output.logits[0, -1].argmax())
    return BaselineRun(text + stream.flush(), generated, len(ids), ttft_s)


@contextmanager
def _sdpa(model: Any) -> Iterator[Any]:
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield model
    finally:
        model.set_attn_implementation(ours)
