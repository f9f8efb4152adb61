"""How likely a token was, and which were likeliest in its place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logarithms of probabilities where one token was chosen, as the model gives them.

    Neither the temperature nor a constraint changes them.

    Parameters
    ----------
    token_id : int
        What was chosen.
    logprob : float
        Its natural logarithm of probability.
    top : tuple of (int, float)
        The likeliest tokens and theirs, the likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Return the logarithms of probabilities of a token and of the likeliest ones.

    Parameters
    ----------
    logits : Tensor
        ``[vocabulary]``, of the model.
    token_id : int
        What was chosen.
    count : int
        How many of the likeliest.

    Returns
    -------
    TokenLogprobs
    """
    logprobs = logits.float().log_softmax(dim=-1)
    likeliest = logprobs.topk(count)
    top = tuple(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)
