"""Prompts that an engine fuses and vLLM goes on with: all but the last token, under a salt of their own.

Fused KV is no exact KV. It has an identity of its own, so that no look-up of exact prefixes finds it, and it is asked
for by a ``cache_salt`` that is made of its key, so that in vLLM's own prefix cache it is shared by nobody who did not
ask for it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from fused_kv_llm.chunk import ChunkKV, ContentHash, KVIdentity
from fused_kv_llm.errors import PromptError, UnsupportedModelError
from fused_kv_llm.store import KVStore
from fused_kv_vllm.model_files import fingerprint_model_files, model_path

if TYPE_CHECKING:
    from fused_kv_llm.config import RecomputeRatio
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.prompt import Prompt
    from fused_kv_llm.report import FusionReport
    from fused_kv_llm.selectors import Selector

__all__ = ["HANDED_MODEL_TYPES", "HandedPrompt", "hand_over", "handed_identity", "handed_key"]

HANDED_MODEL_TYPES = ("llama",)
"""Model types whose keys and values were found to be the same in transformers and in vLLM."""

_SALT = "fused-kv:"
_NO_TEXT = ContentHash(prefix=0, full=0, length=0)


@dataclass(frozen=True, slots=True)
class HandedPrompt:
    """What to ask vLLM for.

    Parameters
    ----------
    token_ids : list of int
        The prompt. vLLM has to get it as token ids: ``"prompt"`` of ``/v1/completions``.
    cache_salt : str
        By which vLLM finds its KV, and nothing else does.
    report : FusionReport
        What fusing it took.
    """

    token_ids: list[int]
    cache_salt: str
    report: FusionReport


def hand_over(
    engine: FusedKVEngine,
    prompt: Prompt,
    store: KVStore,
    *,
    recompute_ratio: RecomputeRatio | None = None,
    selector: str | Selector | None = None,
) -> HandedPrompt:
    """Fuse a prompt and put its KV, but that of the last token, where vLLM's connector looks.

    Parameters
    ----------
    engine : FusedKVEngine
        With the model and the dtype of vLLM, of the same files.
    prompt : str or list of messages
    store : KVStore
        The connector's; the engine's own if both have one folder.
    recompute_ratio, selector
        Override the engine's for this prompt.

    Returns
    -------
    HandedPrompt

    Raises
    ------
    UnsupportedModelError
        The model is of a type that is not known to compute the same KV in vLLM, or is not that of its files.
    PromptError
        The prompt is of one token.
    StoreError
        The KV cannot be stored.
    """
    identity = _identity_of(engine)
    fused, report = engine.prefill(prompt, recompute_ratio=recompute_ratio, selector=selector)
    try:
        ids = tuple(engine.encode(prompt))
        count = len(ids) - 1
        if count < 1:
            raise PromptError("A prompt of one token has nothing that could be handed over: ask vLLM for it.")
        keys, values = (part[:, 0, :, :count].cpu().contiguous() for part in (fused.cache.keys, fused.cache.values))
        recipe = json.dumps({"recompute_ratio": report.recompute_ratio, "selector": report.selector})
        # By content: what was fused otherwise, with other chunks in the store for example, is another prompt.
        content = [xxhash.xxh3_128_hexdigest(part.view(torch.uint8).numpy().data) for part in (keys, values)]
        told = json.dumps([identity.digest, engine.config.tenant, recipe, ids, content])
        key = hashlib.sha256(told.encode()).hexdigest()
        store.put(key, identity.digest, recipe, _NO_TEXT, ChunkKV(keys, values, ids[:-1], 0))
    finally:
        fused.cache.release()
    return HandedPrompt(list(ids), f"{_SALT}{key}", report)


def _identity_of(engine: FusedKVEngine) -> KVIdentity:
    model, given = engine.loaded.model, engine.config.model
    kind = model.config.model_type
    if kind not in HANDED_MODEL_TYPES:
        raise UnsupportedModelError(
            f"The model {engine.loaded.model_id!r} is of type {kind!r}. Prompts can be handed over of types whose KV "
            f"is known to be the same in vLLM: {', '.join(HANDED_MODEL_TYPES)}."
        )
    if not isinstance(given, (str, Path)) or hasattr(model, "peft_config") or getattr(model, "is_quantized", False):
        raise UnsupportedModelError(
            f"The model {engine.loaded.model_id!r} is not that of its files: it was given as an object, has an "
            "adapter, or was quantised when it was loaded. vLLM would go on with another one."
        )
    dtype = str(engine.loaded.dtype).removeprefix("torch.")
    return handed_identity(fingerprint_model_files(model_path(model.name_or_path)), dtype)


def handed_identity(fingerprint: str, dtype: str) -> KVIdentity:
    """Return the identity of prompts that are handed over.

    Parameters
    ----------
    fingerprint : str
        ``fingerprint_model_files``.
    dtype : str
        In which the model computes and its KV is kept.
    """
    return KVIdentity(
        model=fingerprint,
        tokenizer="",
        dtype=dtype,
        rope="as the model's files say",
        prefix="from the first token",
        preprocessing="perhaps fused, handed over to vLLM",
    )


def handed_key(salt: str | None) -> str | None:
    """Return the key of the KV that a ``cache_salt`` asks for; None if it is a tenant's."""
    if salt is None or not salt.startswith(_SALT):
        return None
    key = salt.removeprefix(_SALT)
    return key if len(key) == 64 and set(key) <= set("0123456789abcdef") else None
