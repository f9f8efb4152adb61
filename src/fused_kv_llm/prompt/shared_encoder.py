"""One encoder for all who encode with the same tokenizer: to make one takes half a second."""

from __future__ import annotations

import hashlib
import threading
from typing import Any
from weakref import WeakKeyDictionary

from .backend import backend_text
from .encoding import TokenEncoder

__all__ = ["shared_encoder"]

_MadeOf = tuple[str, str, bool]

_encoders: WeakKeyDictionary[Any, tuple[_MadeOf, TokenEncoder]] = WeakKeyDictionary()
_lock = threading.Lock()


def shared_encoder(tokenizer: Any, template_source: str = "") -> TokenEncoder:
    """Return the encoder of a tokenizer as it is now; the same one until the tokenizer is changed or gone.

    Parameters
    ----------
    tokenizer : transformers fast tokenizer
        Only read.
    template_source : str
        Source of the chat template, empty when there is none.

    Raises
    ------
    UnsupportedModelError
        If the tokenizer has no fast (Rust) backend or the backend cannot be copied.
    """
    backend, splits_special = backend_text(tokenizer), bool(getattr(tokenizer, "split_special_tokens", False))
    made_of = hashlib.sha256(backend.encode()).hexdigest(), template_source, splits_special
    with _lock:
        known = _encoders.get(tokenizer)
        if known is None or known[0] != made_of:
            known = made_of, TokenEncoder(backend, template_source, splits_special=splits_special)
            _encoders[tokenizer] = known
        return known[1]
