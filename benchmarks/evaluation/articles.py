"""Longer chunks: passages of one article joined, as a splitter with a larger chunk size would have left them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from .questions import read_lines

__all__ = ["join_articles"]


def join_articles(path: Path, chunk_tokens: int, count_tokens: Callable[[str], int]) -> dict[str, str]:
    """Return the chunk that each passage of a set stands in.

    Passages with one title are an article, in the order of their ids; an article with one passage is one chunk.

    Parameters
    ----------
    path : Path
        Question file.
    chunk_tokens : int
        About how many tokens a chunk has: a passage goes where its middle does not lie beyond them.
    count_tokens : callable
        Tokens of a text.

    Returns
    -------
    dict of str to str
        By passage id, in the order of the articles.
    """
    articles: dict[str, dict[str, str]] = {}
    for record in read_lines(path):
        for passage in record["passages"]:
            articles.setdefault(passage["title"] or passage["id"], {})[passage["id"]] = passage["text"].strip()
    joined: dict[str, str] = {}
    for article in articles.values():
        sizes = {name: count_tokens(article[name]) for name in sorted(article)}
        for names in _groups(sizes, chunk_tokens):
            joined.update(dict.fromkeys(names, "\n\n".join(article[name] for name in names)))
    return joined


def _groups(sizes: dict[str, int], chunk_tokens: int) -> Iterator[list[str]]:
    names: list[str] = []
    tokens = 0
    for name, size in sizes.items():
        if names and tokens + size / 2 > chunk_tokens:
            yield names
            names, tokens = [], 0
        names.append(name)
        tokens += size
    if names:
        yield names
