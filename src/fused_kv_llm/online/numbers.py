"""The numbers in a prompt: which tokens belong to the same one."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["numbers_in"]

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?")
"""Thousands may be set apart by commas, and decimals by a full stop or a comma. A list is several numbers."""

_MOST_CHARACTERS = 24
"""No answer copies a longer one, and it could take the whole budget."""


def numbers_in(text: str, offsets: NDArray[np.int64]) -> Tensor:
    """Return which number every token belongs to, wholly or in part.

    Parameters
    ----------
    text : str
        Numbers are written in digits, such as 1973, 3.5 and 273,282; what is longer than 24 characters does not count.
    offsets : numpy.ndarray
        int64 ``[tokens, 2]``, half-open spans in `text`; a token with an empty one belongs to no number.

    Returns
    -------
    Tensor
        int64 ``[tokens]``: 0 for the first number in the text, and so on; -1 for a token of none.
    """
    matches = (match.span() for match in _NUMBER.finditer(text))
    spans = np.array([span for span in matches if span[1] - span[0] <= _MOST_CHARACTERS], dtype=np.int64).reshape(-1, 2)
    # The first number that ends behind the token's start, if it begins before the token's end.
    found = np.searchsorted(spans[:, 1], offsets[:, 0], side="right")
    starts = np.append(spans[:, 0], len(text) + 1)
    inside = (starts[found] < offsets[:, 1]) & (offsets[:, 0] < offsets[:, 1])
    return torch.from_numpy(np.where(inside, found, -1))
