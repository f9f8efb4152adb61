"""Constrained decoding: answers that always match a JSON schema, by ``llguidance``."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import ConfigError, MissingExtraError
from fused_kv_llm.online import Constraint, end_token_ids

__all__ = ["json_constraint"]

_CLOSING_TOKENS = 16

_tokenizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def json_constraint(engine: FusedKVEngine, schema: Mapping[str, Any] | None, *, max_tokens: int) -> Constraint:
    """Return a constraint under which the answer is one JSON value.

    Parameters
    ----------
    engine : FusedKVEngine
    schema : mapping or None
        JSON schema; None allows any JSON object.
    max_tokens : int
        Longest answer. Before it is reached, strings, lists and objects are closed as soon as the schema allows it,
        so that the answer is complete rather than cut; it must hold at least the schema's property names.

    Returns
    -------
    callable
        For one request: ``FusedKVEngine.stream(..., constraint=...)``.

    Raises
    ------
    MissingExtraError
        If ``llguidance`` is not installed.
    ConfigError
        If the schema cannot be compiled.
    """
    library = _library()
    defaults = {"whitespace_flexible": False}
    rules = _closed(schema) if schema is not None else {"type": "object"}
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(rules), defaults=defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The JSON schema cannot be used: {error}") from error
    tokenizer = _tokenizer_of(engine)
    problem = library.LLMatcher.validate_grammar(grammar, tokenizer)
    if problem:
        raise ConfigError(f"The JSON schema cannot be used: {problem}")
    names = len(engine.token_ids(json.dumps(list(_property_names(rules)))))
    # Past half of the answer at the latest: what is left must hold every name, and some more per value.
    hurry = max_tokens - min(2 * names + _CLOSING_TOKENS, max_tokens // 2)
    ends = sorted(end_token_ids(engine.loaded))
    return _Matcher(library.LLMatcher(tokenizer, grammar), ends, _closers(engine), hurry)


def _property_names(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _property_names(item)
    elif isinstance(schema, Mapping):
        if isinstance(schema.get("properties"), Mapping):
            yield from map(str, schema["properties"])
        for value in schema.values():
            yield from _property_names(value)


def _closers(engine: FusedKVEngine) -> Tensor:
    """The tokens that end a string, a list or an object."""
    ids = [engine.token_ids(text) for text in ('"', "}", "]")]
    return torch.tensor([found[-1] for found in ids if len(found) == 1], dtype=torch.int64)


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


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("llguidance", "structured") from error
    return llguidance


class _Matcher:
    """Masks the tokens that the grammar does not allow next; one request's state."""

    def __init__(self, matcher: Any, end_ids: list[int], closers: Tensor, hurry: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._closers = closers
        self._hurry = hurry
        self._seen = 0

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        for token in token_ids[self._seen :]:
            self._matcher.consume_token(token)
        self._seen = len(token_ids)
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            mask = torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool))
            allowed[: min(len(mask), len(allowed))] = mask[: len(allowed)]
        if self._seen >= self._hurry and allowed[self._closers].any():
            closing = self._closers[allowed[self._closers]]
            allowed.zero_()
            allowed[closing] = True
        if not allowed.any() or self._matcher.is_accepting():
            allowed[self._end_ids] = True
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


def _tokenizer_of(engine: FusedKVEngine) -> Any:
    with _lock:
        made = _tokenizers.get(engine.tokenizer)
        if made is None:
            library = _library()
            ends = sorted(end_token_ids(engine.loaded))
            text = engine.tokenizer.backend_tokenizer.to_str()
            size = max(len(engine.tokenizer), int(engine.model.config.vocab_size))
            made = _tokenizers[engine.tokenizer] = library.LLTokenizer(text, n_vocab=size, eos_token=ends)
        return made
