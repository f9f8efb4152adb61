"""Constrained decoding: answers that always match a JSON schema, by ``llguidance``."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fused_kv_llm.decoding.end_tokens import end_token_ids
from fused_kv_llm.errors import ConfigError, MissingExtraError
from fused_kv_llm.model import LoadedModel

__all__ = ["JSONConstraint", "json_constraint"]

# As json.dumps writes it, which is what models have read most of.
_WRITTEN: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ITEM_TOKENS = 8  # what another item or property needs beside its names
_NEAR_THE_END = 8  # of the likeliest tokens are tried, so that none begins what cannot be completed
_LONGEST_ENDING = 512  # tokens

_tokenizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def json_constraint(loaded: LoadedModel, schema: Mapping[str, Any] | None, *, max_tokens: int) -> JSONConstraint:
    """Return a constraint under which the answer is one JSON value.

    Parameters
    ----------
    loaded : LoadedModel
    schema : mapping or None
        JSON schema; None allows any JSON object.
    max_tokens : int
        Longest answer. Shortly before the rest would not fit, strings, numbers, lists and objects are closed as soon
        as the schema allows it, so that the answer is complete rather than cut; it must hold at least the names of
        the required properties.

    Returns
    -------
    JSONConstraint
        For one request: ``FusedKVEngine.stream(..., constraint=...)``.

    Raises
    ------
    MissingExtraError
        If ``llguidance`` is not installed.
    ConfigError
        If the schema cannot be compiled.
    """
    library = _library()
    try:
        rules = _closed(schema) if schema is not None else {"type": "object"}
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(rules), defaults=_WRITTEN)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"The JSON schema cannot be used: {error}") from error
    tokenizer = _tokenizer_of(loaded)
    problem = library.LLMatcher.validate_grammar(grammar, tokenizer)
    if problem:
        raise ConfigError(f"The JSON schema cannot be used: {problem}")
    names = len(_encode(loaded, json.dumps(list(_property_names(rules)))))
    ends = sorted(end_token_ids(loaded))
    return JSONConstraint(
        library.LLMatcher(tokenizer, grammar), _Marks.of(loaded), ends, max_tokens, names + _ITEM_TOKENS
    )


def _property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _property_names(item)
    elif isinstance(schema, Mapping):
        if isinstance(schema.get("properties"), Mapping):
            yield from map(str, schema["properties"])
        for value in schema.values():
            yield from _property_names(value)


def _closed(schema: Any) -> Any:
    """Let objects have only the properties they list, unless the schema says otherwise.

    JSON schema's own default allows any others, and a small model goes on inventing them until the answer is cut.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(closed.get("properties"), Mapping) and closed.get("type", "object") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _encode(loaded: LoadedModel, text: str) -> list[int]:
    return cast("list[int]", loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured") from error
    return llguidance


@dataclass(frozen=True, slots=True)
class _Marks:
    """The ids of the tokens that are one character of JSON, as far as the vocabulary has them."""

    quote: list[int]
    brackets: list[int]
    comma: list[int]
    letters: list[int]

    @classmethod
    def of(cls, loaded: LoadedModel) -> _Marks:
        def ids(characters: str) -> list[int]:
            found = [_encode(loaded, character) for character in characters]
            return [one[0] for one in found if len(one) == 1]

        return cls(ids('"'), ids("}]"), ids(","), ids("zQ#@"))


class JSONConstraint:
    """Masks the tokens that the grammar does not allow next; the state of one request.

    Attributes
    ----------
    shortened : bool
        Whether the model would have written more than ``max_tokens`` had room for.
    """

    def __init__(self, matcher: Any, marks: _Marks, end_ids: list[int], max_tokens: int, item_tokens: int) -> None:
        self.shortened = False
        self._matcher = matcher
        self._marks = marks
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._item_tokens = item_tokens
        self._seen = 0
        self._check_at = 0
        self._is_too_late = False

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Return the logits with minus infinity for what may not come next.

        Parameters
        ----------
        token_ids : sequence of int
            The answer so far.
        logits : Tensor
            Float, ``[vocabulary]``.
        """
        for token in token_ids[self._seen :]:
            self._matcher.consume_token(token)
        self._seen = len(token_ids)
        allowed = _allowed(self._matcher, len(logits))
        if self._seen >= self._check_at:
            self._keep_room(allowed, logits)
        if not allowed.any() or self._matcher.is_accepting():
            allowed[self._end_ids] = True
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def _keep_room(self, allowed: Tensor, logits: Tensor) -> None:
        """Allow only what leaves room for an ending, where little room is left."""
        left = self._max_tokens - self._seen
        ending = left + 1 if self._is_too_late else self._tokens_to_end(self._matcher, len(logits), left)
        spare = left - ending - self._item_tokens
        if spare > 0:
            # A token takes one place and may open what needs a few more to be closed.
            self._check_at = self._seen + max(1, spare // 4)
            return
        if not allowed.any():
            return
        soonest = self._soonest(self._matcher, allowed)
        if ending > left:
            # Nor will it fit later: each token is one step of the same ending. All requests wait for this one's search.
            self._is_too_late = self.shortened = True
            allowed.zero_()
            allowed[soonest] = True
            return
        likely = logits.masked_fill(~allowed.to(logits.device), float("-inf")).topk(_NEAR_THE_END).indices.tolist()
        fitting = [token for token in likely if allowed[token] and self._fits(token, left - 1, len(logits))]
        self.shortened |= likely[0] not in fitting
        allowed.zero_()
        allowed[fitting or soonest] = True

    def _fits(self, token: int, left: int, vocabulary: int) -> bool:
        matcher = self._matcher.deep_copy()
        return matcher.consume_token(token) and self._tokens_to_end(matcher, vocabulary, left) <= left

    def _tokens_to_end(self, matcher: Any, vocabulary: int, left: int = _LONGEST_ENDING) -> int:
        """How many tokens a short ending has, or that it has more than `left`; each is what :meth:`_soonest` gives."""
        matcher, most = matcher.deep_copy(), min(_LONGEST_ENDING, left + 1)
        for count in range(most):
            if matcher.is_stopped() or matcher.is_accepting():
                return count
            ways = self._soonest(matcher, _allowed(matcher, vocabulary))
            if not ways or not matcher.consume_token(ways[0]):
                return _LONGEST_ENDING
        return most

    def _soonest(self, matcher: Any, allowed: Tensor) -> list[int]:
        """The token that leads to the end soonest: out of strings, numbers, lists and objects."""
        marks = self._marks
        forced = matcher.compute_ff_tokens()[:1]
        in_string = bool(allowed[marks.letters].any())
        for ids in [marks.quote, forced] if in_string else [marks.brackets, forced, marks.quote, marks.comma]:
            if possible := [token for token in ids if allowed[token]]:
                return possible[:1]
        return cast("list[int]", allowed.nonzero()[:1, 0].tolist())


def _allowed(matcher: Any, vocabulary: int) -> Tensor:
    """Return a bool mask ``[vocabulary]`` of what may come next; all False at the end."""
    allowed = torch.zeros(vocabulary, dtype=torch.bool)
    if not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        mask = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))
        allowed[: min(len(mask), vocabulary)] = mask[:vocabulary]
    return allowed


def _tokenizer_of(loaded: LoadedModel) -> Any:
    with _lock:
        made = _tokenizers.get(loaded.tokenizer)
        if made is None:
            library = _library()
            ends = sorted(end_token_ids(loaded))
            text = loaded.tokenizer.backend_tokenizer.to_str()
            size = max(len(loaded.tokenizer), int(loaded.model.config.vocab_size))
            made = _tokenizers[loaded.tokenizer] = library.LLTokenizer(text, n_vocab=size, eos_token=ends)
        return made
