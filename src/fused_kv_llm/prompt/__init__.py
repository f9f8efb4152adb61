"""The prompt: rendered and tokenised as the model does, with the stored chunks found in it."""

from __future__ import annotations

from .align import Alignment, align
from .chat import ChatPrompt, Prompt, RawPrompt
from .content_index import WINDOW, ContentIndex, Match, content_hash, is_indexable
from .encoding import Encoded
from .near_match import NearMatch, SearchedText, difference
from .plan import PromptPlan, Segment, UnusedMatch, plan_prompt
from .render import PromptRenderer, Rendered

__all__ = [
    "WINDOW",
    "Alignment",
    "ChatPrompt",
    "ContentIndex",
    "Encoded",
    "Match",
    "NearMatch",
    "Prompt",
    "PromptPlan",
    "PromptRenderer",
    "RawPrompt",
    "Rendered",
    "SearchedText",
    "Segment",
    "UnusedMatch",
    "align",
    "content_hash",
    "difference",
    "is_indexable",
    "plan_prompt",
]
