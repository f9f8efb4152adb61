"""Which words and numbers of an answer stand in no chunk: a hint at what a model has made up.

This looks at words only. It does not see that a sentence was turned into its opposite, or that words of two chunks
were put together wrongly; and a right answer in other words than the chunks' is marked. A judge model sees more, where
one is at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Support", "Unsupported", "lexical_support"]

_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
# Words that every text has; they say nothing of where the others come from.
_COMMON_WORDS = """
    a about after all also although am an and any are as at be because been before being below between both but by can
    cannot could did do does doing during each either else every few for from further had has have having he her here
    him his how however i if in into is it its just may me might more most much must my neither no nor not now of off on
    once one only or other our out over own rather same shall she should so some such than that the their them then
    there therefore these they this those though through thus to too under until up us very was we were what when where
    whether which while who whom whose why will with within without would yes you your
"""
_COMMON = frozenset(_COMMON_WORDS.split())
_ELISION = re.compile(r"['\u2019].*")
_ENDING_CHARS = 3
_STEM_CHARS = 4


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A word or number that no chunk holds.

    Parameters
    ----------
    start, end : int
        Half-open span of characters in the answer.
    text : str
    """

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Support:
    """What of an answer its chunks hold.

    Parameters
    ----------
    share : float
        Words and numbers that were found over all that were looked for; 1 where there was nothing to look for.
    spans : list of Unsupported
        Those that were not found, in order.
    """

    share: float
    spans: list[Unsupported]


def lexical_support(answer: str, chunks: Iterable[str]) -> Support:
    """Look for the words and numbers of an answer in its chunks; the time grows linearly with their lengths.

    Common words are not looked for. Case and a word's last letters are left out of account, so that "ferries" is found
    where "ferry" is; numbers have to be the same, however their thousands are separated.

    Parameters
    ----------
    answer : str
    chunks : iterable of str
        Texts that it may rest on. The question may be one of them.

    Returns
    -------
    Support
    """
    # Each word once: a text repeats most of its words.
    words = {match[0] for chunk in chunks for match in _WORD.finditer(chunk)}
    held = {_stem(word) for word in words}
    asked = [
        match for match in _WORD.finditer(answer) if match[0].casefold() not in _COMMON and _says_something(match[0])
    ]
    missing = [Unsupported(*match.span(), match[0]) for match in asked if _stem(match[0]) not in held]
    return Support((len(asked) - len(missing)) / len(asked) if asked else 1.0, missing)


def _says_something(word: str) -> bool:
    bare = _bare(word)
    return bare[0].isdigit() or (len(bare) > 1 and bare not in _COMMON)


def _stem(word: str) -> str:
    bare = _bare(word)
    return bare if bare[0].isdigit() else bare[: max(_STEM_CHARS, len(bare) - _ENDING_CHARS)]


def _bare(word: str) -> str:
    if word[0].isdigit():
        # "1,874" is "1874", and "3.50" is not "350".
        return re.sub(r",(?=\d{3}(?:\D|$))", "", word)
    return _ELISION.sub("", word.casefold())
