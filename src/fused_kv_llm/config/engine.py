"""The options of an engine: the one place where each is named, described, checked and given its default.

The constructor of ``FusedKVEngine``, the fields of the framework classes, the options of the command line and the
table in ``docs/options.md`` are made from the fields below. A new option is one more field here, and whatever uses it.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fused_kv_llm.errors import ConfigError, FusedKVError

from . import checks
from .option import Option
from .values import RecomputeRatio

__all__ = [
    "DEFAULT_MEMORY",
    "DEFAULT_MODEL",
    "DEFAULT_NEIGHBOURS",
    "DEFAULT_POLICY",
    "DEFAULT_PREPROCESSING",
    "DEFAULT_PREPROCESSING_PROMPTS",
    "DEFAULT_RATIO",
    "DEFAULT_SELECTOR",
    "EngineConfig",
    "option_of",
]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_RATIO = 0.15
DEFAULT_SELECTOR = "sink_attention"
DEFAULT_MEMORY = "2GiB"
DEFAULT_POLICY = "pgdsf"
DEFAULT_PREPROCESSING: Final = "similar"
DEFAULT_NEIGHBOURS = 9
DEFAULT_PREPROCESSING_PROMPTS: Final = 2
PUBLISHED_NEIGHBOURS = 10


class EngineConfig(BaseModel):
    """The options of an engine, checked.

    Names of models, selectors and policies are checked by those who look them up.

    Raises
    ------
    ConfigError
        If there is no option of a name, or a value cannot work.

    Examples
    --------
    >>> from fused_kv_llm.config import EngineConfig
    >>> EngineConfig(kv_dir="./kv", memory_bytes="4GB").memory_bytes
    4000000000
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True
    )

    model: Annotated[str | Path | Any, Option(identity=True)] = Field(default=DEFAULT_MODEL, frozen=True)
    """Alias ``"smollm2-135m"``, hub id, local folder, GGUF file, a transformers model in memory, or the result of
    ``load_model``."""

    tokenizer: Annotated[str | Path | Any | None, Option(identity=True)] = Field(default=None, frozen=True, repr=False)
    """Hub id, local folder, GGUF file or a transformers tokenizer; by default the model's own."""

    kv_dir: str | Path = Field(default="./kv", frozen=True)
    """Folder of the chunk-KV store; processes, models and frameworks may share it."""

    recompute_ratio: Annotated[
        RecomputeRatio,
        Option(unit="share of chunk tokens", short_flag="--ratio"),
        BeforeValidator(checks.ratio),
    ] = DEFAULT_RATIO
    """How many of the chunks' tokens are recomputed: 0 reuses everything, 1 is exactly full prefill. ``"auto"`` takes
    the ratio and the selector that ``fused-kv calibrate`` found for this model and corpus. ``"adaptive"`` recomputes in
    rounds, until the answer's first tokens are expected to be near full prefill's."""

    adaptive_target: Annotated[float, Option(unit="nats"), BeforeValidator(checks.target)] = Field(
        default=0.009, frozen=True
    )
    """With ``recompute_ratio="adaptive"``, how far the distributions of the answer's first tokens may be expected to be
    from full prefill's, as a KL divergence, for a round to be the last one."""

    adaptive_cap: Annotated[float, Option(unit="share of chunk tokens"), BeforeValidator(checks.most)] = Field(
        default=0.5, frozen=True
    )
    """With ``recompute_ratio="adaptive"``, the most that is recomputed."""

    selector: str | Any = DEFAULT_SELECTOR
    """Which tokens are recomputed: a key of ``selectors.SELECTORS``, or a selector object."""

    dtype: Annotated[str | Any | None, Option(identity=True)] = Field(default=None, frozen=True)
    """Dtype that the model computes in: float32, bfloat16 or float16, by name or as a ``torch.dtype``. By default the
    hardware decides."""

    device: str | Any | None = Field(default=None, frozen=True)
    """Device that the model is on, such as ``"cpu"`` or ``"cuda:0"``; by default a GPU where there is one."""

    trust_probe: bool = Field(default=False, frozen=True)
    """Whether to take a model of a type that has not been verified if it passes the checks at loading, with a
    warning."""

    memory_bytes: Annotated[int | str, Option(unit="bytes"), BeforeValidator(checks.size)] = Field(
        default=DEFAULT_MEMORY, frozen=True, validate_default=True
    )
    """Budget of the store's memory tier: a number or a text such as ``"4GB"``; 0 keeps nothing in memory."""

    disk_bytes: Annotated[int | str | None, Option(unit="bytes"), BeforeValidator(checks.size)] = Field(
        default=None, frozen=True
    )
    """Budget of the store's files: a number or a text such as ``"200GB"``; by default what the disk holds. The
    chunks of least value make room."""

    policy: str = Field(default=DEFAULT_POLICY, frozen=True)
    """Which chunks make room: lru, lfu, gdsf, pgdsf or reuse."""

    kv_dtype: Annotated[str, Option(identity=True)] = Field(default="auto", frozen=True)
    """Dtype in which keys and values are stored: auto (the model's), float32, bfloat16, float16, int8 or int4."""

    remote: Annotated[str | None, Option(variable="FUSED_KV_REMOTE")] = Field(default=None, frozen=True, repr=False)
    """URL of a remote tier, ``redis://host:6379/0``, ``s3://bucket/prefix`` or ``file:///mnt/share``: evicted chunks go
    there and come back when they are needed."""

    refresh_s: Annotated[float | None, Option(unit="seconds"), BeforeValidator(checks.seconds)] = Field(
        default=None, frozen=True
    )
    """After how many seconds the store looks again for what other machines have put on the remote tier, or deleted
    there. By default it looks when it is opened."""

    preprocessing: Annotated[
        Literal["similar", "fusionrag", "none"], Option(identity=True), BeforeValidator(checks.preprocessing)
    ] = Field(default=DEFAULT_PREPROCESSING, frozen=True)
    """Whether chunks are preprocessed once their KV is stored: each is prefilled again together with similar ones
    (after FusionRAG section 3.1). What these change in it is stored beside its KV, and brings it closer to what it
    would be at a later place in a prompt. ``"fusionrag"`` does it as published: the KV after its neighbours replaces
    the chunk's own, wherever it stands."""

    num_neighbours: Annotated[int | None, Option(unit="chunks", identity=True), BeforeValidator(checks.count)] = Field(
        default=None, frozen=True
    )
    """How many of the chunks most similar to each preprocessing looks for: by default 9, along which chunks are put
    into groups; for ``"fusionrag"`` 10, which stand before the chunk together."""

    preprocessing_prompts: Annotated[int, Option(unit="prompts", identity=True), BeforeValidator(checks.prompts)] = (
        Field(default=DEFAULT_PREPROCESSING_PROMPTS, frozen=True)
    )
    """In how many prompts with chunks of its group ``"similar"`` preprocessing prefills each chunk: 1 (half of them
    are prefilled in a second one, behind the others; all of a group of fewer than four), 2 or 4. More take longer and
    bring answers closer to those of full prefill."""

    embedder: Annotated[Any | None, Option(on_command_line=False)] = Field(
        default=None, frozen=True, exclude=True, repr=False
    )
    """What finds similar chunks: LangChain ``Embeddings``, a LlamaIndex ``BaseEmbedding`` or a
    ``SentenceTransformer``; by default all-MiniLM-L6-v2."""

    tenant: Annotated[str, Option(identity=True)] = Field(default="", frozen=True)
    """Name that keeps the KV of one tenant apart from that of others, even in one folder."""

    store_misses: bool = Field(default=True, frozen=True)
    """Whether retrieved chunks that a prompt contains and the store lacks are ingested after the request, in the
    background."""

    batch_tokens: Annotated[int | None, Option(unit="tokens"), BeforeValidator(checks.count)] = Field(
        default=None, frozen=True
    )
    """How many tokens ingestion computes in one forward: the same new texts then give the same bytes, whatever the
    speed of the machine, with the same number of threads. By default what takes half a second, or less beside
    requests."""

    variants: Annotated[int, Option(unit="variants"), BeforeValidator(checks.variants)] = Field(default=0, frozen=True)
    """How many variants of a chunk are kept beside its plain KV: its KV behind the chunks that stood before it in
    earlier prompts (Cache-Craft section 3.3). They are computed in the background, by prefilling prompts once more, and
    used by the selectors cache_craft and
    sink_attention_variants."""

    variant_bytes: Annotated[int | str | None, Option(unit="bytes"), BeforeValidator(checks.size)] = Field(
        default=None, frozen=True
    )
    """How much the variants of all chunks may take: a number or a text such as ``"10GB"``; by default what `disk_bytes`
    leaves. The variants that save least make room for others; chunks never do."""

    max_num_seqs: Annotated[int | None, Option(unit="requests"), BeforeValidator(checks.count)] = Field(
        default=None, frozen=True
    )
    """How many requests are computed at once; others wait. By default 16 on a CPU and 128 on a GPU."""

    max_batched_rows: Annotated[int | None, Option(unit="rows"), BeforeValidator(checks.count)] = Field(
        default=None, frozen=True
    )
    """How many rows a step computes while answers are being written, one for each answer and the rest for the next
    prompt: more bring the next first token sooner, fewer let answers flow more evenly. By default 48 for each thread
    of a CPU, 2048 on a GPU. Where a prompt is computed layer by layer, it is how many of its rows go through a layer
    together, by default 256 for each thread."""

    kv_pool_bytes: Annotated[int | str | None, Option(unit="bytes"), BeforeValidator(checks.size)] = Field(
        default=None, frozen=True
    )
    """How much KV the requests that are computed at once may take; others wait. By default a quarter of the memory that
    is free."""

    share_chunk_kv: Annotated[Literal["auto", "always", "never"], BeforeValidator(checks.sharing)] = Field(
        default="auto", frozen=True
    )
    """Whether answers that are being written share the KV of their chunks, on a CPU: ``"auto"`` where ``kv_pool_bytes``
    gets short and it saves memory, ``"always"``, or ``"never"``. A copy for each is faster."""

    prefix_cache_bytes: Annotated[int | str | None, Option(unit="bytes"), BeforeValidator(checks.size)] = Field(
        default=None, frozen=True
    )
    """How much KV of answered prompts is kept in memory for prompts that begin with the same tokens, such as the next
    turn of a conversation: a number or a text such as ``"1GiB"``; 0 keeps none. By default an eighth of the memory that
    is free."""

    prefix_policy: str = Field(default="gdsf", frozen=True)
    """Which KV of answered prompts makes room: one of those of `policy`."""

    max_step_retries: Annotated[int, Option(unit="retries"), BeforeValidator(checks.not_negative)] = Field(
        default=2, frozen=True
    )
    """How often in a row a request is tried again whose step failed: an answer goes on from the KV it has first, and
    then behind its prompt computed anew. After that it ends with ``StepFailedError``."""

    load_timeout_s: Annotated[float, Option(unit="seconds"), BeforeValidator(checks.seconds)] = Field(
        default=30.0, frozen=True
    )
    """For how long a request waits for stored KV of which nothing comes. Then the chunks are computed instead."""

    max_queued: Annotated[int, Option(unit="requests"), BeforeValidator(checks.not_negative)] = Field(
        default=1024, frozen=True
    )
    """How many requests may wait; more are refused with ``QueueFullError``."""

    reorder_window: Annotated[int, Option(unit="requests"), BeforeValidator(checks.not_negative)] = Field(
        default=32, frozen=True
    )
    """How many later requests may be answered before one that waits, because more of their prompts is cached
    (RAGCache, section 5.2); 0 keeps the order in which they came."""

    wrap_chat_template: Annotated[bool, Option(identity=True)] = Field(default=True, frozen=True)
    """Whether a prompt given as a string becomes one user message of the model's chat template."""

    if not TYPE_CHECKING:  # type checkers and editors are to see the signature that pydantic makes of the fields

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except ValidationError as error:
                raise _refusal(type(self), error) from error

    @property
    def neighbours(self) -> int:
        """How many similar chunks preprocessing uses, whether chosen or by default."""
        default = PUBLISHED_NEIGHBOURS if self.preprocessing == "fusionrag" else DEFAULT_NEIGHBOURS
        return default if self.num_neighbours is None else self.num_neighbours

    @classmethod
    def _hint(cls, unknown: str) -> str:
        """Return what to do about an option that does not exist."""
        close = get_close_matches(unknown, cls.model_fields, n=1)
        return f"did you mean {close[0]!r}?" if close else f"its options: {', '.join(cls.model_fields)}"


def option_of(name: str) -> Option:
    """Return what an option of ``EngineConfig`` is besides its type, default and description."""
    return next((note for note in EngineConfig.model_fields[name].metadata if isinstance(note, Option)), Option())


def _refusal(config: type[EngineConfig], error: ValidationError) -> FusedKVError:
    """Return an error of this project that says what pydantic found."""
    problems = []
    for problem in error.errors():
        found, name = problem.get("ctx", {}).get("error"), ".".join(map(str, problem["loc"]))
        if isinstance(found, FusedKVError):
            problems.append(found)
        elif problem["type"] == "extra_forbidden":
            problems.append(ConfigError(f"{config.__name__} has no option {name!r}; {config._hint(name)}"))
        else:
            field = config.model_fields.get(name)
            # What is left out when a configuration is shown may be a password.
            given = f"={problem['input']!r}" if field is None or field.repr else ""
            problems.append(ConfigError(f"{name}{given} cannot work: {problem['msg']}"))
    return problems[0] if len(problems) == 1 else ConfigError("; ".join(map(str, problems)))
