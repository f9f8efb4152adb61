"""Finds a text that a prompt has in another form, and tells what was changed.

Everything here is bounded: a few hundred searches for short strings, each linear in the prompt, and a comparison of a
few dozen pieces. A hostile prompt costs time in proportion to its length.
"""

from __future__ import annotations

import difflib
import html
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

__all__ = ["Change", "NearMatch", "SearchedText", "difference"]

Change = Literal["escaped", "respaced", "shortened", "rewritten"]

_MAX_TEXT_CHARS = 20_000
_MAX_PROMPT_CHARS = 4_000_000
_ANCHOR_CHARS = 24
# Fewer characters, without white space, may stand anywhere.
_LEAST_CHARS = 16
_ANCHORS = 64
# What is there of a text that this little is left of may as well be somebody else's words.
_LEAST_SHARE = 0.2
_REWRITTEN_SHARE = 0.3
_DIFF_PIECES = 60
_DIFF_LINES = 12
_LINE_CHARS = 160
_SENTENCE = re.compile(r"[^\n.!?]*[\n.!?]?\s*")
_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class NearMatch:
    """A place in a prompt where a text stands in another form.

    Parameters
    ----------
    change : {"escaped", "respaced", "shortened", "rewritten"}
        What makes it another form: escapes of a program's or a page's text; white space; parts that are missing;
        or other characters in between.
    found : str
        What stands there.
    """

    change: Change
    found: str


class SearchedText:
    """A prompt in which texts are looked for that are not in it verbatim; not for several threads.

    Parameters
    ----------
    text : str
        The prompt; what is beyond four million characters is not looked at.
    """

    def __init__(self, text: str) -> None:
        self.text = text[:_MAX_PROMPT_CHARS]

    @cached_property
    def _squeezed(self) -> str:
        """The text without white space."""
        return "".join(self.text.split())

    def find(self, text: str) -> NearMatch | None:
        """Look for a text that is not there verbatim.

        Parameters
        ----------
        text : str
            What is beyond twenty thousand characters is not looked at.

        Returns
        -------
        NearMatch or None
        """
        text = text[:_MAX_TEXT_CHARS]
        for form in escaped_forms(text):
            if form in self.text:
                return NearMatch("escaped", form)
        squeezed = "".join(text.split())
        if len(squeezed) < _LEAST_CHARS:
            return None
        at = self._squeezed.find(squeezed)
        if at >= 0:
            return NearMatch("respaced", self._original(at, at + len(squeezed)))
        return self._parts_of(squeezed)

    def _parts_of(self, squeezed: str) -> NearMatch | None:
        """Look for pieces of a text that lie about as far from each other as in it."""
        step = max(1, (len(squeezed) - _ANCHOR_CHARS) // (_ANCHORS - 1))
        starts = range(0, max(1, len(squeezed) - _ANCHOR_CHARS + 1), step)
        size = min(_ANCHOR_CHARS, len(squeezed))
        places = [(start, self._squeezed.find(squeezed[start : start + size])) for start in starts]
        found = [(start, at) for start, at in places if at >= 0]
        if len(found) < max(1, _LEAST_SHARE * len(places)):
            return None
        # Pieces of one place agree, but for what is missing between them, on where the text would begin.
        area = max(len(squeezed), 1)
        begins, _ = Counter((at - start) // area for start, at in found).most_common(1)[0]
        here = [(start, at) for start, at in found if begins - 1 <= (at - start) // area <= begins + 1]
        if len(here) < max(1, _LEAST_SHARE * len(places)):
            return None
        first, stop = min(at for _, at in here), max(at for _, at in here) + size
        stop = min(stop, first + 2 * len(squeezed))
        # A piece that is missing between two that are there was changed if it left room behind.
        inside = [(start, at) for start, at in here if first <= at < stop]
        span = max(start for start, _ in inside) + size - min(start for start, _ in inside)
        kept = stop - first
        missing = len(squeezed) - span + max(0, span - kept)
        changed = kept >= (1 - _REWRITTEN_SHARE) * span and len(inside) < self._expected(inside, step)
        change: Change = "rewritten" if changed and missing < _REWRITTEN_SHARE * len(squeezed) else "shortened"
        return NearMatch(change, self._original(first, stop))

    @staticmethod
    def _expected(inside: list[tuple[int, int]], step: int) -> int:
        starts = [start for start, _ in inside]
        return (max(starts) - min(starts)) // step + 1

    def _original(self, start: int, stop: int) -> str:
        """Return the original of a span of the squeezed text, white space included."""
        done, begin = 0, None
        for word in _WORD.finditer(self.text):
            size = word.end() - word.start()
            if begin is None and done + size > start:
                begin = word.start() + start - done
            if done + size >= stop:
                return self.text[begin : word.start() + stop - done]
            done += size
        return self.text[begin or 0 :]


def escaped_forms(text: str) -> list[str]:
    """Return how programs write a text inside another one, without the forms that are the text itself."""
    page = html.escape(text)
    forms = [
        repr(text)[1:-1],
        json.dumps(text)[1:-1],
        json.dumps(text, ensure_ascii=False)[1:-1],
        page,
        html.escape(text, quote=False),
        page.replace("&#x27;", "'"),
        page.replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
    ]
    return [form for form in dict.fromkeys(forms) if form != text]


def difference(text: str, found: str) -> str:
    """Return a short unified diff from an ingested text to what stands in a prompt.

    Parameters
    ----------
    text, found : str

    Returns
    -------
    str
        At most a dozen lines, with white space written as escapes; empty for equal texts.
    """
    one, other = (_pieces(side) for side in (text, found))
    lines = list(difflib.unified_diff(one, other, "ingested", "in the prompt", lineterm="", n=0))
    shown = [line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…" for line in lines]
    return "\n".join(shown if len(shown) <= _DIFF_LINES else [*shown[: _DIFF_LINES - 1], "…"])


def _pieces(text: str) -> list[str]:
    """Cut into sentences and lines, as far as the diff goes."""
    pieces = []
    for piece in _SENTENCE.finditer(text[:_MAX_TEXT_CHARS]):
        if piece[0]:
            pieces.append(repr(piece[0])[1:-1])
        if len(pieces) == _DIFF_PIECES:
            break
    return pieces
