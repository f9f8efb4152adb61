"""Systems that answer many users, as `serving_load` takes them: the engine, and both ways of transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from serving_load import Answer
from transformers import ContinuousBatchingConfig, GenerationConfig

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.decoding import end_token_ids

__all__ = ["continuous_batching", "of_engine", "of_generate"]

# Tokens of a page of transformers' cache: its default.
_PAGE_TOKENS = 256
_BATCH_TOKENS = 512


def of_engine(engine: FusedKVEngine, max_tokens: int) -> Answer:
    """Return how the engine answers a text, without ending by itself."""
    ends = torch.tensor(sorted(end_token_ids(engine.loaded)))

    def go_on(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(0, ends, -torch.inf)

    def answer(prompt: str) -> Iterator[int]:
        for piece in engine.submit(prompt, max_tokens=max_tokens, constraint=go_on).pieces():
            if piece.token_id is not None:
                yield piece.token_id

    return answer


def of_generate(plain: Any, max_tokens: int) -> Answer:
    """Return how transformers' ``generate`` answers token ids, one prompt at a time."""
    turn = threading.Lock()

    def answer(prompt: list[int]) -> Iterator[int]:
        with turn:
            yield from _Streamed(plain, prompt, max_tokens)

    return answer


class _Streamed:
    """The tokens of transformers' ``generate``, as they come."""

    def __init__(self, plain: Any, prompt: list[int], max_tokens: int) -> None:
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._is_prompt = True
        options = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False, "streamer": self}
        self._thread = threading.Thread(target=plain.generate, args=(torch.tensor([prompt]),), kwargs=options)
        self._thread.start()

    def put(self, ids: torch.Tensor) -> None:
        """Take the prompt, then one token at a time."""
        if not self._is_prompt:
            self._queue.put(int(ids.flatten()[-1]))
        self._is_prompt = False

    def end(self) -> None:
        """Take the end of the answer."""
        self._queue.put(None)

    def __iter__(self) -> Iterator[int]:
        while (token := self._queue.get()) is not None:
            yield token
        self._thread.join()


@contextmanager
def continuous_batching(plain: Any, max_tokens: int, at_once: int, longest_prompt: int) -> Iterator[Answer]:
    """Yield how transformers' continuous batching answers token ids: what ``generate_batch`` runs, with streams.

    Its attention on a CPU looks at the caches of all requests for every row, so its cache has no more pages than the
    requests need; nothing is shared between prompts.

    Parameters
    ----------
    plain : PreTrainedModel
    max_tokens, at_once, longest_prompt : int
        What the cache is made for.
    """
    pages = -(-(longest_prompt + max_tokens) // _PAGE_TOKENS) * at_once
    config = ContinuousBatchingConfig(
        page_size=_PAGE_TOKENS,
        num_blocks=pages + 1,
        max_batch_tokens=_BATCH_TOKENS,
        max_requests_per_batch=at_once,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False,
        auto_switch_to_flash=False,
    )
    generation = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1)
    with plain.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        streams: dict[str, SimpleQueue[Any]] = {}
        ended = threading.Event()
        delivering = threading.Thread(target=_deliver, args=(manager, streams, ended))
        delivering.start()

        def answer(prompt: list[int]) -> Iterator[int]:
            stream: SimpleQueue[Any] = SimpleQueue()
            name = f"asked-{id(stream)}"
            streams[name] = stream
            manager.add_request(prompt, request_id=name, max_new_tokens=max_tokens, streaming=True, eos_token_id=-1)
            sent = 0
            while sent < max_tokens:
                output = stream.get()
                if output.error is not None:
                    raise RuntimeError(output.error)
                yield from output.generated_tokens[sent:]
                sent = len(output.generated_tokens)
            del streams[name]

        try:
            yield answer
        finally:
            ended.set()
            delivering.join()


def _deliver(manager: Any, streams: dict[str, SimpleQueue[Any]], ended: threading.Event) -> None:
    while not ended.is_set():
        output = manager.get_result(timeout=0.2)
        if output is not None and output.request_id in streams:
            streams[output.request_id].put(output)
