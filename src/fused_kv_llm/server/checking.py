"""``/v1/documents/check``: would a text be reused, and if not, why; ``/v1/support``: is an answer in its chunks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, field_validator

from fused_kv_llm.report import lexical_support

from .document_routes import Owned
from .document_schemas import CheckedText
from .schemas import answers_with
from .state import state_of

__all__ = ["router"]

router = APIRouter()

# A few tenths of a second.
_SUPPORT_CHARS = 200_000


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1)


class _Answered(BaseModel):
    model_config = ConfigDict(extra="forbid")

    answer: str = Field(max_length=_SUPPORT_CHARS)
    chunks: Annotated[list[str], Field(max_length=256)]
    """What it may rest on; the question may be among them."""

    @field_validator("chunks")
    @classmethod
    def _not_too_long(cls, chunks: list[str]) -> list[str]:
        if sum(map(len, chunks)) > _SUPPORT_CHARS:
            raise ValueError(f"the chunks are longer than {_SUPPORT_CHARS} characters together")
        return chunks


class UnsupportedWord(BaseModel):
    """A word or number that no chunk holds, and where it stands."""

    start: int
    end: int
    text: str


class SupportOfAnswer(BaseModel):
    """How many of an answer's words and numbers its chunks hold."""

    share: float
    spans: list[UnsupportedWord]


@router.post("/v1/support")
def support(given: _Answered) -> SupportOfAnswer:
    """Find the words and numbers of an answer that stand in no chunk; it does not see what they say."""
    return SupportOfAnswer.model_validate(asdict(lexical_support(given.answer, given.chunks)))


@router.post("/v1/documents/check", responses=answers_with(CheckedText))
async def check(http: Request, owner: Owned, given: _Text) -> dict[str, Any]:
    """Say whether a text would be reused in a prompt that contains it; nothing of what other tenants have is told."""
    state = state_of(http)
    state.check_open()

    def judged() -> dict[str, Any]:
        with state.tenants.using(owner.tenant, owner.apart) as engine:
            return engine.explain_text(given.text).to_dict()

    return await run_in_threadpool(judged)
