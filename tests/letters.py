"""An embedder that needs no packages and can be pickled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class LetterFrequencies:
    """Embeds by the frequencies of letters."""

    name = "letter-frequencies"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        counts = [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
        vectors = np.array(counts, np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
