"""Parsing a GGUF file once for a conversion.

By itself, transformers has ``gguf`` parse the file's header three times for one conversion, and build the table of
tensor names for every module of the model. That is most of the time that a conversion takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from fused_kv_llm.reading_lock import READING

__all__ = ["parsed_once"]


@contextmanager
def parsed_once() -> Iterator[None]:
    """Have ``gguf`` give the same reader of a file, and the same table of names, as often as it is asked within.

    transformers asks ``gguf`` by these names and changes nothing of what it gets. The lock is held within: a thread
    must not put back what another one still uses.
    """
    import gguf

    with READING:
        kept: dict[str, Any] = {name: cache(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
        with patch.multiple(gguf, **kept):
            yield
