"""What the sizing calculator is given: a model's geometry, a machine, and a load."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Self

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import STORAGE_DTYPES, stored_bytes_per_token

__all__ = ["Machine", "ModelGeometry", "Workload"]


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What of a model decides about bytes and operations.

    Parameters
    ----------
    params : float
        Weights that a token goes through.
    layers, heads, kv_heads, head_dim : int
    weight_bytes : float
        Of a weight.
    kv_dtype : str
        In which KV is stored, one of ``STORAGE_DTYPES`` but ``"auto"``. On the device it has two bytes a number.

    Raises
    ------
    ConfigError
        If there can be no such model.
    """

    params: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check_positive(self, but=("kv_dtype",))
        if self.kv_dtype == "auto" or self.kv_dtype not in STORAGE_DTYPES:
            known = ", ".join(name for name in STORAGE_DTYPES if name != "auto")
            raise ConfigError(f"kv_dtype={self.kv_dtype!r} is not known: give one of {known}.")

    @classmethod
    def of_config(cls, config: dict[str, Any], **more: Any) -> Self:
        """Return the geometry in a model's ``config.json``; `more` says what that does not.

        Raises
        ------
        ConfigError
            If the file lacks a field.
        """
        try:
            heads, layers = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
            hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
            vocabulary = int(config["vocab_size"])
        except KeyError as error:
            raise ConfigError(
                f"The configuration has no {error.args[0]!r}: give the model's numbers instead."
            ) from error
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        # Projections of attention, a gated feed-forward and the head: nearly all of a dense decoder's weights.
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        params = layers * (attention + 3 * hidden * inner) + vocabulary * hidden
        return cls(**{"params": params, "layers": layers, "heads": heads, "kv_heads": kv_heads,
                      "head_dim": head_dim} | more)  # fmt: skip

    @property
    def stored_bytes(self) -> int:
        """Stored bytes of a token's KV."""
        return stored_bytes_per_token(self.kv_dtype, self.layers, self.kv_heads, self.head_dim, self.head_dim)

    @property
    def device_bytes(self) -> int:
        """Bytes of a token's KV on the device."""
        return 4 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Machine:
    """What a replica runs on: figures that it reaches, not those that are printed on it.

    Parameters
    ----------
    flops_per_s, device_bytes_per_s : float
        Operations and bytes of a forward.
    step_s : float
        What a forward takes besides.
    device_kv_bytes : float
        For KV, beside the weights.
    memory_bytes, disk_bytes : float
        Of the memory tier and of the store's folder.
    load_bytes_per_s, disk_bytes_per_s, remote_bytes_per_s : float
        From memory to the device, from the disk, and from the shared store.

    Raises
    ------
    ConfigError
        If a figure is not positive.
    """

    flops_per_s: float
    device_bytes_per_s: float
    device_kv_bytes: float
    memory_bytes: float
    disk_bytes: float
    load_bytes_per_s: float
    disk_bytes_per_s: float
    remote_bytes_per_s: float
    step_s: float = 2e-3

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Workload:
    """A corpus and those who ask about it.

    Parameters
    ----------
    chunks : int
    chunk_tokens : float
        Mean.
    requests_per_s : float
        At the busiest time.
    chunks_per_request : float
    question_tokens, answer_tokens : float
        Prompt tokens that are in no chunk, and tokens of an answer.
    recompute_ratio : float
    zipf_exponent : float
        Of the use of chunks; 0 is even use, which no cache helps with.
    utilisation : float
        Part of what a replica can do at most that it is to do: the rest keeps waiting times short.
    most_at_once : int
        Answers that a replica writes at once, ``max_num_seqs``.

    Raises
    ------
    ConfigError
        If a figure cannot be.
    """

    chunks: int
    chunk_tokens: float
    requests_per_s: float
    chunks_per_request: float
    question_tokens: float = 64.0
    answer_tokens: float = 128.0
    recompute_ratio: float = 0.15
    zipf_exponent: float = 0.8
    utilisation: float = 0.7
    most_at_once: int = 128

    def __post_init__(self) -> None:
        _check_positive(self, but=("recompute_ratio", "zipf_exponent", "question_tokens"))
        if not (0 <= self.recompute_ratio <= 1 and 0 < self.utilisation <= 1):
            raise ConfigError(
                f"recompute_ratio={self.recompute_ratio!r} and utilisation={self.utilisation!r} are shares: "
                "give numbers between 0 and 1."
            )
        if self.zipf_exponent < 0 or self.question_tokens < 0:
            raise ConfigError("zipf_exponent and question_tokens must not be negative.")

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt."""
        return self.chunks_per_request * self.chunk_tokens + self.question_tokens


def _check_positive(given: Any, but: tuple[str, ...] = ()) -> None:
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name not in but and not 0 < value < math.inf:
            raise ConfigError(f"{field.name}={value!r} cannot be: give a positive number.")
