"""When the exact KV of a prefix is valid: the identity under which its spans are stored."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fused_kv_llm.chunk import KVIdentity
from fused_kv_vllm.blocks import BlockLayout

__all__ = ["PrefixIdentity", "is_steady"]

# What a configuration says besides how a forward goes.
_IRRELEVANT = frozenset(
    ("_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
     "output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "torch_dtype", "transformers_version",
     "use_cache")
)  # fmt: skip
_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
_STEADY = ("default", "linear", "llama3", "yarn", "None")


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """Everything besides the token ids and the tenant on which the KV of prefixes depends.

    Parameters
    ----------
    model : str
        Fingerprint of the model's files.
    dtype : str
        In which the model computes, for example ``"bfloat16"``.
    settings : mapping
        The model's configuration, as vLLM uses it: with what the command line changes in it.
    max_model_len : int
        Tokens of the longest prompt that the server takes: some rotations depend on it.
    computed_by : str
        Release of vLLM, quantisation, and whatever else changes what it computes.
    layout : BlockLayout
    epoch : str
        Empty; a random text for weights that are not those of the files any more.
    """

    model: str
    dtype: str
    settings: Mapping[str, Any]
    max_model_len: int
    computed_by: str
    layout: BlockLayout
    epoch: str = ""

    def of_tenant(self, salt: str | None) -> KVIdentity:
        """Return the identity of KV that only requests with this salt may use.

        Parameters
        ----------
        salt : str or None
            vLLM's ``cache_salt``; without one, what all requests without one share.
        """
        relevant = {name: value for name, value in self.settings.items() if name not in _IRRELEVANT}
        rotation = {name: relevant.pop(name) for name in _ROTATION if name in relevant}
        if not is_steady(rotation):
            rotation["max_model_len"] = self.max_model_len
        return KVIdentity(
            model=_digest([self.model, relevant, self.epoch]),
            # Spans are found by token ids, whatever made them from a text.
            tokenizer="",
            dtype=self.dtype,
            rope=_digest(rotation),
            prefix="from the first token",
            # Blocks of vLLM's are no chunk KV: an engine has "none" here, and finds nothing of them.
            preprocessing=f"vllm-blocks {_digest([self.computed_by, asdict(self.layout)])}",
            tenant=salt or "",
        )

    def with_new_weights(self) -> PrefixIdentity:
        """Return the identity of weights that nobody else has: what is stored is not found any more."""
        return replace(self, epoch=secrets.token_hex(16))


def is_steady(rotation: Mapping[str, Any]) -> bool:
    """Whether a configuration's rotation is the same whatever the longest prompt is that a server takes."""
    kinds: set[str] = set()
    todo = [rotation.get("rope_parameters"), rotation.get("rope_scaling")]
    while todo:
        one = todo.pop()
        if isinstance(one, Mapping):
            kinds |= {str(one[name]) for name in ("rope_type", "type") if name in one}
            todo += one.values()
    return kinds <= set(_STEADY)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
