"""The Rust tokenizer behind a fast tokenizer, written as JSON."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedModelError

__all__ = ["backend_text", "is_control", "unknown_token"]


def backend_text(tokenizer: Any) -> str:
    """Describe a fast tokenizer, so that it can be rebuilt.

    Parameters
    ----------
    tokenizer : transformers fast tokenizer
        Only read.

    Returns
    -------
    str
        What its ``tokenizer.json`` holds.

    Raises
    ------
    UnsupportedModelError
        If it is not a fast tokenizer, or has components that cannot be written down.
    """
    name = type(tokenizer).__name__
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or not hasattr(backend, "to_str"):
        raise UnsupportedModelError(
            f"{name} is not a fast tokenizer, so the characters of each token are unknown. Load the model's "
            "tokenizer with AutoTokenizer.from_pretrained from a folder that holds a tokenizer.json."
        )
    try:
        text: str = backend.to_str()
    except Exception as error:  # the Rust binding raises bare Exception
        raise UnsupportedModelError(
            f"The backend of {name} cannot be copied ({error}). Tokenizers with components written in Python "
            "are not supported."
        ) from error
    return text


def is_control(token: dict[str, Any], template_source: str) -> bool:
    """Tell whether an added token steers the model, rather than being a part of its vocabulary.

    Parameters
    ----------
    token : dict
        An entry of the state's ``added_tokens``.
    template_source : str
        Source of the chat template.

    Returns
    -------
    bool
        True for special tokens, and for others that the template mentions and that carry a punctuation
        mark; plain words and white space may be added tokens too.
    """
    text: str = token["content"]
    if token["special"]:
        return bool(text)
    return text in template_source and any(not char.isalnum() and not char.isspace() for char in text)


def unknown_token(model: dict[str, Any]) -> str | None:
    """Name the token that stands for unknown characters.

    Parameters
    ----------
    model : dict
        The state's ``model``.

    Returns
    -------
    str or None
        Its text; None when the model has none.
    """
    unknown: str | None = model.get("unk_token")
    if unknown is None and model.get("unk_id") is not None:
        unknown = model["vocab"][model["unk_id"]][0]
    return unknown
