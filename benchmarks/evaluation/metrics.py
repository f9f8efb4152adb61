"""Metrics of one answer, of the distributions before its tokens, and of one selection.

F1, EM and their normalisation follow SQuAD's evaluation (Rajpurkar et al. 2016): lower case, no punctuation, no
articles, single spaces.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import kl_div

__all__ = ["answer_scores", "exact_match", "f1", "mean_kl", "normalise", "recall", "rouge_l"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def mean_kl(full: Tensor, fused: Tensor) -> float:
    """Return the mean KL divergence of full prefill's distributions from the fused ones.

    Both are float32 log-probabilities ``[tokens, vocabulary]``.
    """
    return float(kl_div(fused, full, log_target=True, reduction="none").sum(-1).mean())


def normalise(text: str) -> str:
    """Return the text as SQuAD compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(predicted: str, gold: str) -> float:
    """Return 1.0 where both are the same text after normalisation."""
    return float(normalise(predicted) == normalise(gold))


def f1(predicted: str, gold: str) -> float:
    """Return the harmonic mean of token precision and recall."""
    ours, theirs = normalise(predicted).split(), normalise(gold).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs))


def rouge_l(predicted: str, reference: str) -> float:
    """Return ROUGE-L, the F measure of the longest common subsequence of words (Lin 2004)."""
    ours, theirs = normalise(predicted).split(), normalise(reference).split()
    if not ours or not theirs:
        return float(ours == theirs)
    longest = [0] * (len(theirs) + 1)
    for word in ours:
        diagonal = 0
        for column, other in enumerate(theirs, 1):
            above = longest[column]
            longest[column] = diagonal + 1 if word == other else max(above, longest[column - 1])
            diagonal = above
    return 2 * longest[-1] / (len(ours) + len(theirs))


def answer_scores(predicted: str, answers: Sequence[str], full_answer: str) -> dict[str, float]:
    """Return F1, EM, containment and answer recall over all accepted answers, and ROUGE-L against full prefill.

    ``answer_recall`` is the share of the accepted answers that the text contains: RULER's string match, where all
    of them are asked for.
    """
    found = [f" {normalise(gold)} " in f" {normalise(predicted)} " for gold in answers]
    return {
        "f1": max(f1(predicted, gold) for gold in answers),
        "em": max(exact_match(predicted, gold) for gold in answers),
        "contains": float(any(found)),
        "answer_recall": sum(found) / len(found),
        "rouge_l": rouge_l(predicted, full_answer),
    }


def recall(selected: Sequence[int], wanted: Sequence[int]) -> float | None:
    """Return the share of the `wanted` positions that were `selected` (QCFuse eq. 13); None without any."""
    return len(set(wanted) & set(selected)) / len(set(wanted)) if wanted else None
