"""Seconds a token of plain transformers, of the engine, and of the engine's step recorded in a CUDA graph."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from random_model import Prompt
from static_decode import StaticDecoder

from fused_kv_llm.model.attention import ATTENTION_NAME

__all__ = ["measure_decoding"]

DECODED_TOKENS = 32


def median_token_s(step: Callable[[int], Any]) -> float:
    """Return the median seconds of decoding a token; the first two warm up."""
    times = []
    for token in range(DECODED_TOKENS):
        started = time.perf_counter()
        int(step(token + 2).argmax())
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def decode_fused_s(prompt: Prompt) -> float:
    """Return the engine's seconds a token."""
    fused = prompt.fused(DECODED_TOKENS + 1)
    try:
        return median_token_s(lambda token: fused.append(prompt.engine.loaded, [token])[-1])
    finally:
        fused.cache.release()


def decode_graph_s(prompt: Prompt) -> float:
    """Return the seconds a token of the engine's step in a CUDA graph."""
    fused = prompt.fused(DECODED_TOKENS + 1)
    try:
        return median_token_s(StaticDecoder(prompt.engine.loaded, fused, graph=True).append)
    finally:
        fused.cache.release()


def decode_plain_s(prompt: Prompt) -> float:
    """Return the seconds a token of plain transformers with SDPA."""
    model = prompt.engine.model
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            rows = torch.tensor([prompt.ids], device=model.device)
            cache = model(rows, use_cache=True, logits_to_keep=1).past_key_values

            def plain(token: int) -> Any:
                row = torch.tensor([[token]], device=model.device)
                return model(row, past_key_values=cache, use_cache=True).logits[0, -1]

            return median_token_s(plain)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def measure_decoding(prompt: Prompt) -> Iterator[dict[str, Any]]:
    """Yield a record for each way to decode; one that fails says so and keeps no other from running."""
    ways = {"decode fused": decode_fused_s, "decode plain": decode_plain_s}
    if prompt.engine.model.device.type == "cuda":
        ways["decode fused, CUDA graph"] = decode_graph_s
    for what, seconds_of in ways.items():
        record: dict[str, Any] = {"prompt_tokens": len(prompt.ids), "what": what}
        try:
            yield record | {"token_s": seconds_of(prompt)}
        except Exception as error:
            traceback.print_exc()
            yield record | {"failed": f"{type(error).__name__}: {error}"}
