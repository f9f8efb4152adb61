"""Compiling the native CPU operators on the machine that runs them.

They are a few hundred lines of C++ for each dtype, which the machine's own compiler turns into a library the first time
it is wanted; it takes seconds, and the library is kept in the user's cache folder under a name that depends on the
source, the compiler and the processor.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

__all__ = ["build", "processor_features"]

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
_BUILD_SECONDS = 120


@functools.lru_cache(maxsize=1)
def processor_features() -> frozenset[str]:
    """Return the processor's instruction sets as Linux names them; none on other systems and architectures."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def _cache_folder() -> Path:
    if os.environ.get("FUSED_KV_CACHE"):
        return Path(os.environ["FUSED_KV_CACHE"])
    # Not at the top: whoever has a GPU builds nothing, and can do without the package.
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("fused_kv_llm"))


def build(folder: str, *extra_flags: str, alone: bool = False) -> Path:
    """Return the path of the library made of one folder's sources and the shared ones, compiling it if it is not there.

    Parameters
    ----------
    folder : str
        Name of a dtype's folder beside this file, or of another one that needs nothing else.
    *extra_flags : str
        For the compiler.
    alone : bool
        Leave the shared sources out.

    Raises
    ------
    OSError
        If there is no compiler, or its output cannot be written.
    subprocess.SubprocessError
        If the compiler fails or takes too long.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler found (c++, g++ or clang++)")
    own, shared = (Path(__file__).parent / name for name in (folder, "shared"))
    folders = (own,) if alone else (own, shared)
    sources, headers = ([path for of in folders for path in sorted(of.glob(kind))] for kind in ("*.cpp", "*.h"))
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_BUILD_SECONDS).stdout
    digest = hashlib.sha256(version + " ".join((*_FLAGS, *extra_flags, *sorted(processor_features()))).encode())
    for source in headers + sources:
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
            flags = (*_FLAGS, *(f"-I{of}" for of in folders), *extra_flags)
            command = [compiler, *flags, *map(str, sources), "-o", temporary]
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=_BUILD_SECONDS)
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return target


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
