"""An extension of the API reference: cross-references of docstrings are shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`[~!]?([^`]+)`")


class PlainRoles(griffe.Extension):
    """Replaces ``:class:`x` `` by the name in code style."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
