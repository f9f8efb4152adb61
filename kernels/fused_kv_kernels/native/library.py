"""Building and loading the native CPU operators.

They are a few hundred lines of C++ that the machine's own compiler turns into a library the first time they are
wanted; it takes seconds, and the library is kept in the user's cache folder under a name that depends on the source,
the compiler and the processor. Without a compiler, or on a processor without AVX512-BF16, torch does the work.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import torch
from platformdirs import user_cache_dir

__all__ = ["loaded_library", "native_library", "why_not_native"]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_FEATURES = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
_BUILD_SECONDS = 120
_lock = threading.Lock()


def native_library() -> ctypes.CDLL | None:
    """Return the native operators, built if need be, or None where they cannot run.

    ``FUSED_KV_KERNELS=torch`` turns them off. A processor that could run them but for a missing compiler is
    reported with a warning, once.
    """
    return _loaded()[0]


def loaded_library() -> ctypes.CDLL:
    """Return the native operators where they are known to be available."""
    library = native_library()
    if library is None:
        msg = "the native CPU operators are not available here"
        raise RuntimeError(msg)
    return library


def why_not_native() -> str | None:
    """Return why torch does the work of the native operators, or None if it does not."""
    return _loaded()[1]


def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    # Asked at every call: whoever sets the variable to compare must not get the native operators all the same.
    if os.environ.get("FUSED_KV_KERNELS") == "torch":
        return None, "FUSED_KV_KERNELS=torch"
    with _lock:
        return _load()


@functools.lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    missing = sorted(_FEATURES - _processor_features())
    if missing:
        return None, f"the processor lacks {', '.join(missing)}"
    try:
        library = _opened()
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or ""
        reason = f"the native CPU operators could not be built: {error} {output.strip()[:500]}".rstrip()
        return None, _warned(reason, "Install a C++ compiler (Debian: g++)")
    if not _agrees_with_torch(library):
        return None, _warned("the native CPU operators compute something else than torch here", "Report your processor")
    return library, None


def _warned(reason: str, remedy: str) -> str:
    warnings.warn(
        f"{reason}\nTorch does their work, about two times slower. {remedy}, or set FUSED_KV_KERNELS=torch to be "
        "content with torch.",
        RuntimeWarning,
        stacklevel=5,
    )
    return reason


def _agrees_with_torch(library: ctypes.CDLL) -> bool:
    """Run one small row attention: which instructions a processor and its hypervisor really have shows in use only."""
    generator = torch.Generator().manual_seed(0)
    rows, keys, dim = 40, 300, 64
    q, k, v = (torch.randn(1, 1, n, dim, generator=generator).bfloat16() for n in (rows, keys, keys))
    positions, out = torch.arange(keys - rows, keys), torch.empty(1, 1, rows, dim, dtype=torch.bfloat16)
    scratch = torch.empty(library.fkv_row_attention_scratch(1, 1, keys, dim), dtype=torch.uint8)
    strides = [int64_array(*tensor.stride()[:3]) for tensor in (q, k, v, out)]
    pointers = (tensor.data_ptr() for tensor in (q, k, v, out, positions, scratch))
    library.fkv_row_attention(*pointers, int64_array(1, 1, 1, rows, keys, dim), *strides, dim**-0.5, num_threads())
    mask = torch.arange(keys) <= positions[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    return torch.allclose(out.float(), want, atol=2e-2, rtol=2e-2)


def _processor_features() -> frozenset[str]:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _opened() -> ctypes.CDLL:
    path = _build()
    try:
        return _declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        # No library, or another one, under this name: whatever happened to it, it is made again.
        path.unlink(missing_ok=True)
        return _declare(ctypes.CDLL(str(_build())))


def _folder_to_build_in(cache: Path) -> Path:
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="fused-kv-native-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        warnings.warn(
            f"{cache} cannot be written ({error}): the native CPU operators are compiled anew in every process. "
            "Set FUSED_KV_CACHE to a folder of yours.",
            RuntimeWarning,
            stacklevel=2,
        )
        return folder


def _build(*extra_flags: str) -> Path:
    """Return the library's path, compiling it if it is not there."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler found (c++, g++ or clang++)")
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.cpp"))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
    digest = hashlib.sha256(version + " ".join((*_FLAGS, *extra_flags, *sorted(_processor_features()))).encode())
    for source in sorted(folder.glob("*.h")) + sources:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("FUSED_KV_CACHE") or user_cache_dir("fused_kv_llm")) / "native"
    target = cache / f"operators-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        cache = _folder_to_build_in(cache)
        target = cache / target.name
        # Another process may build at the same time: each renames its own complete file.
        handle, temporary = tempfile.mkstemp(dir=cache, suffix=".so")
        os.close(handle)
        try:
            command = [compiler, *_FLAGS, *extra_flags, *map(str, sources), "-o", temporary]
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=_BUILD_SECONDS)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return target


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    library.fkv_row_attention_scratch.restype = number
    library.fkv_row_attention_scratch.argtypes = [number] * 4
    library.fkv_row_attention.restype = None
    library.fkv_row_attention.argtypes = [pointer] * 11 + [real, threads]
    library.fkv_token_scores.restype = None
    library.fkv_token_scores.argtypes = [pointer] * 7 + [real, threads]
    library.fkv_place_chunks.restype = None
    library.fkv_place_chunks.argtypes = [pointer, number, number, *[pointer] * 4, *[number] * 5, threads]
    library.fkv_shift_chunks.restype = None
    library.fkv_shift_chunks.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 5, threads]
    library.fkv_fit_shifts.restype = None
    library.fkv_fit_shifts.argtypes = [pointer, number, number, *[pointer] * 11, *[number] * 5, threads]
    library.fkv_rms_norm.restype = None
    library.fkv_rms_norm.argtypes = [*[pointer] * 3, number, number, real, threads]
    library.fkv_gated_silu.restype = None
    library.fkv_gated_silu.argtypes = [*[pointer] * 3, *[number] * 4, threads]
    library.fkv_rotate_rows.restype = None
    library.fkv_rotate_rows.argtypes = [*[pointer] * 5, number, number, threads]
    library.fkv_transfer.restype = None
    library.fkv_transfer.argtypes = [*[pointer] * 8, number, *[pointer] * 4, *[number] * 5, threads]
    return library


def int64_array(*values: int) -> ctypes.Array[ctypes.c_int64]:
    """Return numbers as the operators take shapes and strides."""
    return (ctypes.c_int64 * len(values))(*values)


def num_threads() -> int:
    """Return torch's number of threads: the operators use as many, from the same pool."""
    return torch.get_num_threads()
