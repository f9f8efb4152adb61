"""Compiling the native CPU operators, into a wheel or on the machine that runs them.

They are a few hundred lines of C++ for each dtype. Where the wheel brings no library that runs here, the machine's own
compiler makes one the first time it is wanted. That takes seconds; the library is kept in the user's cache folder under
a name that depends on the sources, the compiler and the processor.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from .processor import processor_features

__all__ = ["build", "compile_library"]

_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fvisibility-inlines-hidden", "-fopenmp", "-shared", "-fPIC")
# CXX may name a C compiler's driver, which compiles C++ but does not link its library.
_LIBRARIES = ("-lstdc++",) if sys.platform == "linux" else ()
_HERE = ("-march=native",)
_BUILD_SECONDS = 120


def compile_library(folder: str, target: Path, *machine_flags: str) -> None:
    """Compile one folder's sources and the shared ones into a library.

    Parameters
    ----------
    folder : str
        Name of a folder of sources beside this file.
    target : Path
        The library's file.
    *machine_flags : str
        Say for which processors, and what else the compiler is to be told.

    Raises
    ------
    OSError
        If there is no compiler.
    subprocess.SubprocessError
        If the compiler fails or takes too long.
    """
    sources = [str(path) for path in _sources(folder) if path.suffix == ".cpp"]
    includes = [f"-I{path}" for path in _folders(folder)]
    command = [_compiler(), *_FLAGS, *machine_flags, *includes, *sources, *_LIBRARIES, "-o", str(target)]
    subprocess.run(command, capture_output=True, check=True, text=True, timeout=_BUILD_SECONDS)


def build(folder: str, *extra_flags: str) -> Path:
    """Return the path of a folder's library for this processor, compiling it if it is not in the cache folder.

    Parameters
    ----------
    folder : str
        Name of a folder of sources beside this file.
    *extra_flags : str
        For the compiler.

    Raises
    ------
    OSError
        If there is no compiler, or its output cannot be written.
    subprocess.SubprocessError
        If the compiler fails or takes too long.
    """
    version = subprocess.run([_compiler(), "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
    flags = (*_HERE, *extra_flags)
    digest = hashlib.sha256(version + " ".join((*_FLAGS, *flags, *sorted(processor_features()))).encode())
    for source in _sources(folder):
        digest.update(source.read_bytes())
    cache = _cache_folder() / "native"
    target = cache / f"{folder}-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        cache = _folder_to_build_in(cache)
        target = cache / target.name
        # Another process may build at the same time: each renames its own complete file.
        handle, temporary = tempfile.mkstemp(dir=cache, suffix=".so")
        os.close(handle)
        try:
            compile_library(folder, Path(temporary), *flags)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return target


def _compiler() -> str:
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if found is None:
        raise FileNotFoundError("no C++ compiler found (c++, g++ or clang++)")
    return found


def _folders(folder: str) -> list[Path]:
    return [Path(__file__).parent / name for name in (folder, "shared")]


def _sources(folder: str) -> list[Path]:
    return [path for kind in ("*.h", "*.cpp") for of in _folders(folder) for path in sorted(of.glob(kind))]


def _cache_folder() -> Path:
    if os.environ.get("FUSED_KV_CACHE"):
        return Path(os.environ["FUSED_KV_CACHE"])
    # Not at the top: whoever has a GPU builds nothing, and can do without the package.
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("fused_kv_llm"))


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
