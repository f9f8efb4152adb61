"""The real models that tests load: SmolLM2 comes with the demo, Gemma with the packages of ``make test``."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from gemma import gemma_file

from fused_kv_llm.errors import ModelNotFoundError
from fused_kv_llm.model import LoadedModel, load_model

__all__ = ["gemma", "plain_gemma"]


def _path() -> str:
    try:
        return str(gemma_file())
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@cache
def gemma(dtype: str = "float32") -> LoadedModel:
    """Return Gemma 3 270M, ready to be fused."""
    return load_model(_path(), dtype=dtype, device="cpu")


@cache
def plain_gemma() -> Any:
    """Return it in float32 as transformers has it."""
    from transformers import AutoModelForCausalLM

    from fused_kv_llm.model.pretrained import locate

    return AutoModelForCausalLM.from_pretrained(locate(_path())[1], dtype=torch.float32).eval()
