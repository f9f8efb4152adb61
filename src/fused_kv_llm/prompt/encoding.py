"""Text to token ids: the model's own way, and with special-token text as ordinary text.

Transformers switches between the two with a flag on one shared object, which is not safe when several
threads encode. Here each way has its own copy of the Rust tokenizer, made once and never changed after.

The second way must still know the control tokens that the chat template wrote. Cutting the text at them
and encoding the pieces would not do: SentencePiece-style tokenizers treat the first piece of a text
differently from later ones. Instead each of the template's own control tokens is replaced by a stand-in of
the same length, made of one private-use character, which the second copy knows as an added token with the
same options. The text is encoded once, whole, and stand-ins become the ids they stand for; the offsets need
no correction.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Encoding, Tokenizer

from ..errors import PromptError
from .backend import is_control, unknown_token

__all__ = ["Encoded", "Span", "TokenEncoder"]

Span = tuple[int, int]

# Plane 16 of the private-use area, less its beginning, where icon fonts live.
_STAND_IN_FIRST = 0x104000
_STAND_IN_LAST = 0x10FFFD


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tokenised text.

    Parameters
    ----------
    ids : list of int
        Token ids.
    offsets : numpy.ndarray
        ``[len(ids), 2]`` int64, half-open character spans in the text. Tokens of one multi-byte character
        share its span; tokens that the tokenizer adds have an empty one.
    """

    ids: list[int]
    offsets: NDArray[np.int64]


class TokenEncoder:
    """Encodes text with private copies of a fast tokenizer; thread-safe.

    *Control tokens* are the tokenizer's special tokens and those of its other added tokens that the chat
    template mentions and that carry a punctuation mark (``<｜User｜>``, ``</think>``); plain words and
    whitespace that happen to be added tokens are not.

    Parameters
    ----------
    backend : str
        The Rust tokenizer as JSON, see :func:`.backend.backend_text`.
    template_source : str
        Source of the chat template, empty when there is none.
    splits_special : bool
        Whether the text of special tokens is ordinary text to :meth:`encode`, too.
    """

    def __init__(self, backend: str, template_source: str, *, splits_special: bool) -> None:
        state = {**json.loads(backend), "truncation": None, "padding": None}
        control = [token for token in state["added_tokens"] if is_control(token, template_source)]
        self._control_ids = {token["content"]: int(token["id"]) for token in control}
        self._special = _any_of([token["content"] for token in control if token["special"]])
        self._control = _any_of([token["content"] for token in control])
        unknown = unknown_token(state["model"])
        # Ordinary text of a tokenizer without byte fallback may yield the unknown token; it ends nothing.
        self._forbidden = {token["id"] for token in control if token["special"] and token["content"] != unknown}
        self._own = Tokenizer.from_str(json.dumps(state))
        self._own.encode_special_tokens = splits_special
        for token in control:
            token["special"] = True
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._plain.encode_special_tokens = True
        self._stand_ins = self._add_stand_ins(control)
        self._stand_in_ids = {self._stand_ins[text]: id_ for text, id_ in self._control_ids.items()}

    def _add_stand_ins(self, control: list[dict[str, Any]]) -> dict[str, str]:
        """Teach the plain copy one stand-in for each control token."""
        # Where the stand-ins begin is drawn at random, so that no document can contain them on purpose.
        room = _STAND_IN_LAST - _STAND_IN_FIRST + 1 - len(control)
        first = _STAND_IN_FIRST + secrets.randbelow(room)
        stand_ins: dict[str, str] = {}
        added = []
        for number, token in enumerate(control):
            stand_in = chr(first + number) * len(token["content"])
            stand_ins[token["content"]] = stand_in
            options = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
            added.append(AddedToken(stand_in, special=False, **options))
        self._plain.add_tokens(added)
        self._stand_in_start = re.compile(f"[{chr(first)}-{chr(first + max(len(control) - 1, 0))}]")
        return stand_ins

    def control_spans(self, text: str, *, special_only: bool = False) -> list[Span]:
        """Find the text of control tokens.

        Parameters
        ----------
        text : str
            Where to look.
        special_only : bool
            Leave out the added tokens that are not special.

        Returns
        -------
        list of (int, int)
            Half-open character spans, ascending; the longest token where several begin.
        """
        pattern = self._special if special_only else self._control
        return [match.span() for match in pattern.finditer(text)]

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded:
        """Encode as ``tokenizer(text, add_special_tokens=...)`` does.

        Raises
        ------
        PromptError
            If the text is not valid Unicode.
        """
        _require_unicode(text)
        encoding = self._own.encode(text, add_special_tokens=add_special_tokens)
        return Encoded(list(encoding.ids), _offsets(encoding))

    def encode_with_control_at(self, text: str, own: Sequence[Span]) -> Encoded:
        """Encode with control tokens at the given places only, and their text elsewhere as ordinary text.

        Parameters
        ----------
        text : str
            The text.
        own : sequence of (int, int)
            Ascending, disjoint spans, each exactly the text of a control token.

        Returns
        -------
        Encoded
            Offsets refer to ``text``.

        Raises
        ------
        PromptError
            If the text is not valid Unicode.
        """
        self._require_encodable(text)
        pieces = []
        position = 0
        for start, end in own:
            pieces += [text[position:start], self._stand_ins[text[start:end]]]
            position = end
        encoding = self._plain.encode("".join([*pieces, text[position:]]), add_special_tokens=False)
        # By the token's string, not its id: a vocabulary with holes could use the stand-in's id already.
        ids = [self._stand_in_ids.get(token, id_) for token, id_ in zip(encoding.tokens, encoding.ids, strict=True)]
        return Encoded(ids, _offsets(encoding))

    def encode_plain(self, text: str) -> list[int]:
        """Encode without special tokens, their text as ordinary text.

        Raises
        ------
        PromptError
            If the text is not valid Unicode, or the tokenizer makes a special token of ordinary text.
        """
        self._require_encodable(text)
        ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        if not self._forbidden.isdisjoint(ids):
            self._refuse(next(id_ for id_ in ids if id_ in self._forbidden))
        return ids

    def require_no_special_inside(self, encoded: Encoded, spans: Sequence[Span]) -> None:
        """Make sure that no special token lies wholly inside any of the character spans.

        Raises
        ------
        PromptError
            If one does: the tokenizer makes a special token of ordinary text.
        """
        for i in np.flatnonzero(np.isin(encoded.ids, list(self._forbidden))).tolist():
            first, last = encoded.offsets[i].tolist()
            if any(start <= first < last <= end for start, end in spans):
                self._refuse(encoded.ids[i])

    def _refuse(self, token_id: int) -> None:
        token = self._own.id_to_token(token_id)
        raise PromptError(
            f"The tokenizer turns ordinary text into its special token {token!r}, which could end the user's "
            "turn. Remove or rewrite that text."
        )

    def _require_encodable(self, text: str) -> None:
        _require_unicode(text)
        if self._stand_in_start.search(text) and any(stand_in in text for stand_in in self._stand_in_ids):
            raise PromptError(
                "The text contains private-use characters that this process uses internally. Remove them, or load "
                "the model again: the characters are drawn at random."
            )


def _any_of(texts: list[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _offsets(encoding: Encoding) -> NDArray[np.int64]:
    count = len(encoding.ids)
    flat = chain.from_iterable(encoding.offsets)
    return np.fromiter(flat, dtype=np.int64, count=2 * count).reshape(count, 2)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"The text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which "
            "no tokenizer can encode. Decode the source with errors='replace'."
        ) from error
