"""Tables and web pages as plain text, in paragraphs that can be split at blank lines."""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

__all__ = ["csv_text", "html_text"]

_UNSEEN = frozenset({"script", "style", "template", "noscript", "svg"})
_INLINE = frozenset(
    {"a", "abbr", "b", "bdi", "bdo", "cite", "code", "em", "font", "i", "kbd", "mark", "q", "s", "samp", "small",
     "span", "strong", "sub", "sup", "time", "u", "var", "wbr"}
)  # fmt: skip
_SPACE = re.compile(r"\s+")


def csv_text(text: str) -> str:
    """Return a table as one paragraph a row, each value behind its column's name.

    Raises
    ------
    csv.Error
        If it is no table, or a field is longer than 131,072 characters.

    Examples
    --------
    >>> csv_text("ship,seats\\nAldebaran,120\\n")
    'ship: Aldebaran; seats: 120'
    """
    rows = csv.reader(io.StringIO(text, newline=""))
    header = next(rows, [])
    return "\n\n".join(
        "; ".join(f"{name}: {value}" if name else value for name, value in zip(_padded(header, row), row, strict=False))
        for row in rows
        if any(row)
    )


def html_text(text: str) -> str:
    """Return what a reader of a web page sees, a paragraph for each block.

    Examples
    --------
    >>> html_text("<h1>Ships</h1><script>x()</script><p>The <b>Aldebaran</b> has 120&nbsp;seats.")
    'Ships\\n\\nThe Aldebaran has 120 seats.'
    """
    seen = _Seen()
    seen.feed(text)
    seen.close()
    return "\n\n".join(filter(None, (_SPACE.sub(" ", "".join(block)).strip() for block in seen.blocks)))


def _padded(header: list[str], row: list[str]) -> list[str]:
    return header + [""] * (len(row) - len(header))


class _Seen(HTMLParser):
    """Collects the text of each block; what scripts and styles contain is not seen."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[list[str]] = [[]]
        self._unseen = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not self._unseen and tag in _UNSEEN:
            self._unseen = tag
        self._end_block(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self._unseen:
            self._unseen = ""
        self._end_block(tag)

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.blocks[-1].append(data)

    def parse_html_declaration(self, i: int) -> int:
        """Read what begins with ``<!``; browsers take ``<![`` for a comment, and Python 3.11 may fail over it."""
        if self.rawdata.startswith("<![", i):
            return self.parse_bogus_comment(i)
        return super().parse_html_declaration(i)

    def _end_block(self, tag: str) -> None:
        if tag not in _INLINE and self.blocks[-1]:
            self.blocks.append([])
