"""Which types of model are known to work, which are known not to, and why.

What a model needs is found when it is loaded (:mod:`.verification`). But a few tokens do not show everything: a feature
that begins behind a thousand tokens passes such a check. So only types that were tested at length are taken without
being asked for.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from fused_kv_llm.errors import FusedKVWarning, UnsupportedModelError

__all__ = ["FAMILIES", "REFUSED", "SUPPORTED_MODEL_TYPES", "Family", "check_model_type", "refuse_known"]


@dataclass(frozen=True, slots=True)
class Family:
    """Types of model that need the same.

    Parameters
    ----------
    name : str
        What they have in common.
    types : tuple of str
        Their ``model_type``.
    examples : str
        Models that people know.
    """

    name: str
    types: tuple[str, ...]
    examples: str


FAMILIES = (
    Family(
        "attention to everything before, dense",
        (
            "apertus",
            "arcee",
            "bitnet",
            "gemma",
            "gpt_neox",
            "granite",
            "granitemoehybrid",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "jais2",
            "llama",
            "ministral3",
            "mistral",
            "nanochat",
            "nemotron",
            "olmo",
            "olmo2",
            "persimmon",
            "phi",
            "phi3",
            "qwen2",
            "qwen3",
            "seed_oss",
            "stablelm",
            "starcoder2",
        ),
        "Llama 2 and 3, SmolLM2, Qwen 2.5 and 3, Mistral 7B, Ministral 3, Phi-4, OLMo 2, Granite 3, Granite 4.0 "
        "without Mamba layers, Gemma, Seed-OSS, Pythia",
    ),
    Family(
        "mixtures of experts",
        (
            "aria_text",
            "dots1",
            "flex_olmo",
            "glm4_moe",
            "granitemoe",
            "granitemoeshared",
            "hy_v3",
            "jetmoe",
            "minimax_m2",
            "mixtral",
            "olmoe",
            "phimoe",
            "qwen2_moe",
            "qwen3_moe",
            "solar_open",
        ),
        "Qwen3-30B-A3B, Mixtral, GLM-4.5, MiniMax-M2, Phi-3.5-MoE, OLMoE",
    ),
    Family(
        "rotation of neighbouring dimensions",
        ("cohere", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"),
        "Command R, GLM-4, ERNIE 4.5, Helium",
    ),
    Family("layers without positions", ("flint", "smollm3"), "SmolLM3"),
    Family(
        "windows, two rotations, capped scores, sinks",
        (
            "afmoe",
            "beam",
            "cohere2",
            "cohere2_moe",
            "cohere_compass_text",
            "cwm",
            "exaone4",
            "exaone_moe",
            "gemma2",
            "gemma3_text",
            "gpt_oss",
            "granite_swa",
            "granitemoe_swa",
            "kolibri1",
            "laguna",
            "mellum",
            "ministral",
            "olmo3",
            "vaultgemma",
        ),
        "Gemma 2 and 3, gpt-oss, Command R7B, North Micro Vision, EXAONE 4, OLMo 3, Ministral; Mistral and Phi-3 with "
        "a window",
    ),
    Family(
        "layers whose KV differs in shape, or is shared",
        ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "mimo_v2_flash"),
        "Gemma 3n, Gemma 4, MiMo-V2-Flash",
    ),
    Family(
        "images beside the text, of which the text is used",
        ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
        "Qwen2-VL, Qwen2.5-VL, Qwen3-VL; Gemma 3, LLaVA, Mistral Small 3.1, InternVL by the types of their text models",
    ),
    Family(
        "latent attention",
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),
        "DeepSeek V2, V3 and R1, GLM-4.7-Flash, MiniCPM3",
    ),
)

SUPPORTED_MODEL_TYPES = tuple(sorted(name for family in FAMILIES for name in family.types))

_STATE = (
    "some of its layers keep a state that needs every earlier token in order, so a chunk has no KV of its own; use a "
    "model with attention in every layer"
)
# Layers that keep one, as configurations call them, in types that also come without.
_STATEFUL = {"linear_attention", "mamba", "mamba2", "conv", "recurrent"}
_LEARNED = "its positions are learned or added and not rotated, so that KV cannot be moved"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "inkling2_text", "inkling_text", "jamba",
            "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
            "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv",
            "xlstm", "zamba", "zamba2",
        ),
        _STATE,
    ),
    **dict.fromkeys(("biogpt", "bloom", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt", "xglm"), _LEARNED),
    **dict.fromkeys(
        (
            "axk2", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm5_next", "glm5_next_text",
            "glm_moe_dsa", "hy_v4", "mistral_large4", "mistral_large4_text", "qwen4_exp", "qwen4_exp_text",
        ),
        "an indexer of its own picks the keys that a token sees; use a model of the same family with full attention",
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"), "it normalises keys behind the rotation, so that they cannot be moved"
    ),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "it scales queries by a count of the rows behind those in the cache and not by their positions, so that rows "
        "recomputed here and there, or for several requests at once, would be scaled wrongly",
    ),
    "diffllama": "its layers compute two attentions by themselves",
    "paligemma": "the tokens of its prompts see what comes after them",
    "doge": "what its tokens see depends on the values in the cache, not on positions alone",
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl_text"), "its attention changes with the length of the prompt"),
}  # fmt: skip


def refuse_known(config: Any, model_id: str) -> None:
    """Refuse a type that is known not to work, or a model with layers that keep a state.

    Parameters
    ----------
    config : transformers.PretrainedConfig
    model_id : str
        The model's name, for messages.

    Raises
    ------
    UnsupportedModelError
    """
    for name in (config.model_type, config.get_text_config().model_type):
        if name in REFUSED:
            raise UnsupportedModelError(f"The model {model_id!r}, of type {name!r}, is not supported: {REFUSED[name]}.")
    layers = _STATEFUL & set(getattr(config.get_text_config(), "layer_types", None) or ())
    if layers:
        raise UnsupportedModelError(
            f"The model {model_id!r}, with layers of type {sorted(layers)[0]!r}, is not supported: {_STATE}."
        )


def check_model_type(config: Any, model_id: str, *, trust_probe: bool = False) -> None:
    """Refuse a type that is known not to work, or not known at all.

    Parameters
    ----------
    config : transformers.PretrainedConfig
    model_id : str
        The model's name, for messages.
    trust_probe : bool
        Whether a type that nobody has tested is left to the checks at loading, with a warning.

    Raises
    ------
    UnsupportedModelError
    """
    refuse_known(config, model_id)
    kind = config.get_text_config().model_type
    if kind in SUPPORTED_MODEL_TYPES:
        return
    if not trust_probe:
        raise UnsupportedModelError(
            f"The model {model_id!r} is not supported: its type {kind!r} has not been verified. Verified are "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}. trust_probe=True takes any decoder that passes the checks at loading."
        )
    warnings.warn(
        f"The type {kind!r} of the model {model_id!r} has not been verified. It is used, as trust_probe=True asks, if "
        "it passes the checks at loading: compare some answers at recompute_ratio=1 with plain transformers'.",
        FusedKVWarning,
        stacklevel=3,
    )
