"""The scheduler's side: what is stored of a request's prompt, and which of its spans are complete.

Requests and steps are vLLM's objects; nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_kv_vllm.handed import handed_key
from fused_kv_vllm.identity import PrefixIdentity
from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.spans import PrefixSpan, prefix_spans
from fused_kv_vllm.transfers import LoadRequest, SpanBlocks, Transfers

__all__ = ["PrefixScheduler"]


@dataclass(slots=True)
class _Prompt:
    """What is known of a request.

    Parameters
    ----------
    spans : list of PrefixSpan
    stored : int
        Spans that were stored, from the first one on, when it was looked up.
    saved : int
        Spans that need not be stored any more.
    at : int
        Tokens that vLLM had itself when it was looked up.
    was_loaded : bool
        Whether it has been loaded for; it is once, so that what cannot be read is not waited for again.
    blocks : list of int
    """

    spans: list[PrefixSpan]
    stored: int
    saved: int = 0
    at: int = 0
    was_loaded: bool = False
    blocks: list[int] = field(default_factory=list)


class PrefixScheduler:
    """Decides what is loaded and stored.

    Parameters
    ----------
    store : PrefixStore
    block_tokens, span_blocks : int
        Tokens of a block; blocks of a span.
    loads, saves : bool
        Whether KV is loaded, and stored: vLLM's ``kv_role``.
    on_refused : callable
        Told once of every reason for which requests are left alone.

    Attributes
    ----------
    identity : PrefixIdentity or None
        None as long as it is not known; nothing is found or stored then.
    handed_identity : str or None
        Digest of the identity of prompts that engines hand over; None takes none.
    """

    def __init__(
        self,
        store: PrefixStore,
        block_tokens: int,
        span_blocks: int,
        *,
        loads: bool = True,
        saves: bool = True,
        on_refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.identity: PrefixIdentity | None = None
        self.handed_identity: str | None = None
        self._store, self._block_tokens, self._span_blocks = store, block_tokens, span_blocks
        self._loads, self._saves = loads, saves
        self._on_refused, self._refused = on_refused, set[str]()
        self._prompts: dict[str, _Prompt] = {}
        self._to_load: list[LoadRequest] = []

    @property
    def _span_tokens(self) -> int:
        return self._block_tokens * self._span_blocks

    def matched(self, request: Any, num_computed: int) -> int:
        """Return how many tokens behind those that vLLM has can be loaded.

        Parameters
        ----------
        request : vllm.v1.request.Request
        num_computed : int
            Tokens that vLLM has, whole blocks.
        """
        prompt = self._look_up(request)
        if prompt is None or prompt.was_loaded or not self._loads:
            return 0
        prompt.at = num_computed
        # The last token is always computed: its logits are needed.
        usable = [one.stop for one in prompt.spans[: prompt.stored] if one.stop < len(request.prompt_token_ids)]
        return max(0, max(usable, default=0) - num_computed)

    def allocated(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """Note the blocks of a request of which `num_external` tokens are to be loaded."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or num_external <= 0:
            return
        prompt.was_loaded = True
        parts = tuple(self._parts(prompt, blocks, prompt.at, prompt.at + num_external))
        self._to_load.append(LoadRequest(request.request_id, parts))

    def step(self, output: Any) -> Transfers:
        """Return what the worker has to do in a step, and forget it.

        Parameters
        ----------
        output : vllm.v1.core.sched.output.SchedulerOutput
        """
        loads, self._to_load = tuple(self._to_load), []
        saves: list[SpanBlocks] = []
        for new in output.scheduled_new_reqs:
            if (prompt := self._prompts.get(new.req_id)) is not None:
                prompt.blocks = list(new.block_ids[0])
                # Fewer are there than were stored if some could not be read.
                there = new.num_computed_tokens // self._span_tokens
                prompt.saved = min(prompt.stored, there) if prompt.was_loaded else prompt.stored
                saves += self._complete(prompt, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            if (prompt := self._prompts.get(name)) is not None:
                added = cached.new_block_ids[number]
                if name in cached.resumed_req_ids:
                    prompt.blocks = []
                prompt.blocks += [] if added is None else added[0]
                saves += self._complete(prompt, cached.num_computed_tokens[number] + output.num_scheduled_tokens[name])
        return Transfers(loads, tuple(saves), output.total_num_scheduled_tokens == 0)

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._prompts.pop(request_id, None)

    def forget_weights(self) -> None:
        """Find nothing of what is stored: the weights are not those of the model's files any more."""
        if self.identity is not None:
            self.identity = self.identity.with_new_weights()
        self.handed_identity = None
        self._prompts.clear()

    # -- inside ----------------------------------------------------------------------------------------------

    def _look_up(self, request: Any) -> _Prompt | None:
        prompt = self._prompts.get(request.request_id)
        if prompt is None and self.identity is not None and self._takes(request):
            spans = self._spans(self.identity, request)
            prompt = self._prompts[request.request_id] = _Prompt(spans, self._store.known(spans))
        return prompt

    def _spans(self, identity: PrefixIdentity, request: Any) -> list[PrefixSpan]:
        key = handed_key(request.cache_salt)
        if key is None:
            return prefix_spans(
                identity.of_tenant(request.cache_salt).digest, request.prompt_token_ids, self._span_tokens
            )
        ids = tuple(request.prompt_token_ids[:-1])
        if self.handed_identity is None or not ids:
            return []
        return [PrefixSpan(key, self.handed_identity, 0, ids, is_handed=True)]

    def _takes(self, request: Any) -> bool:
        """Whether a prompt's KV depends on nothing but its tokens and the model."""
        reasons = {
            "a LoRA adapter": request.lora_request is not None,
            "images, sounds or videos": bool(request.mm_features),
            "embeddings in place of tokens": request.prompt_embeds is not None
            or request.prompt_is_token_ids is not None,
        }
        for reason, is_so in reasons.items():
            if is_so and reason not in self._refused:
                self._refused.add(reason)
                self._on_refused(reason)
        return not any(reasons.values()) and request.prompt_token_ids is not None

    def _complete(self, prompt: _Prompt, num_computed: int) -> Iterator[SpanBlocks]:
        # What follows KV that may be fused is not exact.
        exact = [] if any(span.is_handed for span in prompt.spans) else prompt.spans
        complete = min(num_computed // self._span_tokens, len(exact))
        first, prompt.saved = prompt.saved, max(prompt.saved, complete)
        if self._saves and complete > first:
            start, stop = first * self._span_tokens, complete * self._span_tokens
            yield from self._parts(prompt, prompt.blocks, start, stop)

    def _parts(self, prompt: _Prompt, blocks: Sequence[int], start: int, stop: int) -> Iterator[SpanBlocks]:
        """Yield the spans with tokens from `start` to `stop`, with the blocks of these."""
        for span in prompt.spans:
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                part = tuple(blocks[first // self._block_tokens : -(-last // self._block_tokens)])
                yield SpanBlocks(span, part, (first - span.start) // self._block_tokens)
