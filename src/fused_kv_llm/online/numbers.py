"""The numbers in a prompt: which tokens belong to the same one."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["numbers_in"]

_NUMBER = re.compile(r"\d(?:[\d.,]*\d)?")


def numbers_in(text: str, offsets: NDArray[np.int64]) -> Tensor:
    """Return which number every token belongs to, wholly or in part.

    Parameters
    ----------
    text : str
        Numbers are runs of digits in it, with full stops and commas between them.
    offsets : numpy.ndarray
        int64 ``[tokens, 2]``, half-open spans in `text`; they ascend.

    Returns
    -------
    Tensor
        int64 ``[tokens]``: 0 for the first number in the text, and so on; -1 for a token of none.
    """
    spans = np.array([match.span() for match in _NUMBER.finditer(text)], dtype=np.int64).reshape(-1, 2)
    # The first number that ends behind the token's start, if it begins before the token's end.
    found = np.searchsorted(spans[:, 1], offsets[:, 0], side="right")
    starts = np.append(spans[:, 0], len(text) + 1)
    return torch.from_numpy(np.where(starts[found] < offsets[:, 1], found, -1))
