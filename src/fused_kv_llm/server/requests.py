"""What clients ask, in OpenAI's words; what is not supported is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from .messages import ChatMessage

__all__ = [
    "AskedRatio",
    "ChatRequest",
    "CompletionRequest",
    "FusedKVOptions",
    "Retrieve",
    "StreamOptions",
    "TokenizeRequest",
]

# Below it sampling is greedy anyway, and clients write small numbers for zero.
_GREEDY_BELOW = 1e-3

AskedRatio = Annotated[float, Field(ge=0, le=1)] | Literal["auto", "adaptive"]
ExpectedChunk = Annotated[str, Field(max_length=100_000)]
Zero = Annotated[float, Field(ge=0, le=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """What a stream has besides the answer."""

    include_usage: bool = False


class Retrieve(_Strict):
    """What is looked up in the tenant's documents for a conversation's last message."""

    k: int = Field(default=4, ge=1, le=64)
    """Chunks to put into the prompt, if they fit."""


class FusedKVOptions(_Strict):
    """What this server can do and others cannot: the extra field ``fused_kv`` of a request's body."""

    recompute_ratio: AskedRatio | None = None
    """Share of the chunks' tokens that is recomputed; 1 is full prefill."""
    selector: str | None = Field(default=None, max_length=64)
    """What chooses them."""
    tenant: str | None = Field(default=None, min_length=1, max_length=128)
    """Keeps what is stored for the key's tenant apart once more, for instance by end user."""
    retrieve: Retrieve | None = None
    """Answer a conversation from the tenant's documents."""
    trace: bool = False
    """Keep the scores by which tokens were chosen, for ``/v1/requests/ID/trace``."""
    expected: Annotated[list[ExpectedChunk], Field(max_length=64)] | None = None
    """Chunks that the prompt should contain: the report has a verdict on each."""


class Sampling(_Strict):
    """What both kinds of requests have."""

    model: str = Field(max_length=256)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0, le=2)
    top_p: float | None = Field(default=1.0, gt=0, le=1)
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    n: int | None = Field(default=1, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    fused_kv: FusedKVOptions = Field(default_factory=FusedKVOptions)
    # Accepted where they change nothing.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @field_validator("fused_kv", mode="before")
    @classmethod
    def _none_are_the_defaults(cls, value: object) -> object:
        return {} if value is None else value

    @model_validator(mode="after")
    def _streams_with_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def sampling(self) -> dict[str, Any]:
        """Return the options of the engine for choosing tokens."""
        temperature = 1.0 if self.temperature is None else self.temperature
        options: dict[str, Any] = {
            "temperature": 0.0 if temperature < _GREEDY_BELOW else temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": self.stop,
            "seed": self.seed,
        }
        options["trace_scores"] = self.fused_kv.trace
        return options | self.fused_kv.model_dump(
            include={"recompute_ratio", "selector", "expected"}, exclude_none=True
        )


class FunctionOfTool(_Strict):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionOfTool


class NamedFunction(_Strict):
    """The name of a tool's function."""

    name: str


class NamedTool(_Strict):
    """A tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class JSONSchemaFormat(_Strict):
    """A schema, and its name."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.json_schema is None):
            raise ValueError("json_schema needs a schema: {'name': ..., 'schema': {...}}")
        return self

    def wanted(self) -> dict[str, Any] | None:
        """Return it as :func:`fused_kv_llm.decoding.answer_schema` takes it."""
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return {"type": self.type, "schema": schema}


class ChatRequest(Sampling):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    # Accepted where they change nothing.
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self


class CompletionRequest(Sampling):
    """The body of ``/v1/completions``."""

    prompt: str | Annotated[list[str], Field(min_length=1)]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    # Accepted where they change nothing.
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _has_no_retrieval(self) -> CompletionRequest:
        if self.fused_kv.retrieve is not None:
            raise ValueError("fused_kv.retrieve is for conversations: use /v1/chat/completions")
        return self


class TokenizeRequest(_Strict):
    """The body of ``/tokenize``: a text as it is, or messages as the chat template renders them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
