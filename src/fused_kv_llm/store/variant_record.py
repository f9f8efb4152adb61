"""What is recorded of a variant when it is cached: the chunks before it, and how much it looks at them.

A variant of a chunk is its KV as a full prefill computed it behind a sequence of other chunks
(Cache-Craft section 3.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["VARIANT", "VariantRecord", "about_name", "is_about", "variant_name"]

VARIANT = "variant-"
"""How the names of all sidecars of variants begin."""

_ABOUT = "-about"


def variant_name(prefix: Sequence[str]) -> str:
    """Return the name of the variant behind chunks of these keys, in this order."""
    return VARIANT + hashlib.sha256(",".join(prefix).encode()).hexdigest()[:16]


def about_name(name: str) -> str:
    """Return the name of the sidecar with a variant's record; that of its KV is the variant's own."""
    return name + _ABOUT


def is_about(name: str) -> bool:
    """Whether a sidecar is a variant's record."""
    return name.startswith(VARIANT) and name.endswith(_ABOUT)


@dataclass(frozen=True, slots=True, eq=False)
class VariantRecord:
    """The metadata of a variant of a chunk of ``T`` tokens, behind ``P`` chunks, in a model of ``L`` layers.

    Parameters
    ----------
    prefix : tuple of str
        Keys of the chunks before it, in order; at least one, none twice.
    prefix_tokens : Tensor
        int64 ``[P]``, how many tokens each of them had in the prompt.
    inter : Tensor
        float32 ``[L, P]``: attention from the chunk's tokens to each of them, summed over tokens and averaged over
        heads (equation 3).
    intra : Tensor
        float32 ``[L]``: attention from the chunk's tokens to earlier tokens of the chunk, summed and averaged likewise
        (equation 4).
    token_inter : Tensor
        float32 ``[T]``: each token's attention to all of the chunks before, averaged over layers and heads (the sum in
        equation 14); 0 for tokens that are not covered.
    position : int
        Where the chunk's first token stood, or would have stood.
    covered : tuple of int
        Half-open range of the chunk's tokens that the prompt contained; the others have no KV.
    """

    prefix: tuple[str, ...]
    prefix_tokens: Tensor
    inter: Tensor
    intra: Tensor
    token_inter: Tensor
    position: int
    covered: tuple[int, int]

    @property
    def name(self) -> str:
        """The variant's name."""
        return variant_name(self.prefix)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk that are covered."""
        return self.covered[1] - self.covered[0]

    @property
    def place(self) -> Tensor:
        """int64 ``[3]``: position and covered range."""
        return torch.tensor([self.position, *self.covered])

    def tensors(self) -> dict[str, Tensor]:
        """Return what is stored of it."""
        keys = torch.frombuffer(bytearray(bytes.fromhex("".join(self.prefix))), dtype=torch.uint8)
        return {
            "prefix": keys.view(len(self.prefix), -1).clone(),
            "prefix_tokens": self.prefix_tokens,
            "inter": self.inter,
            "intra": self.intra,
            "token_inter": self.token_inter,
            "place": self.place,
        }

    @classmethod
    def of_tensors(cls, stored: Mapping[str, Tensor]) -> VariantRecord | None:
        """Read a record from the tensors that :meth:`tensors` returned; None if they are something else."""
        try:
            prefix, place = stored["prefix"], stored["place"].tolist()
            tokens, inter = stored["prefix_tokens"], stored["inter"]
            fits = prefix.dim() == 2 and prefix.shape[1] == 32 and len(place) == 3 and 0 <= place[1] < place[2]
            fits = fits and inter.shape == (stored["intra"].shape[0], prefix.shape[0]) and tokens.shape[0] > 0
            if not fits or prefix.shape[0] != tokens.shape[0] or place[2] > stored["token_inter"].shape[0]:
                return None
            keys = tuple(bytes(row).hex() for row in prefix.tolist())
            return cls(keys, tokens, inter, stored["intra"], stored["token_inter"], place[0], (place[1], place[2]))
        except (KeyError, IndexError, TypeError, ValueError):
            return None
