"""The processor's instruction sets, and the levels of instruction sets that prebuilt libraries are compiled for."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LEVELS", "Level", "processor_features"]


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions: the compiler's flags that allow it, and every processor feature that these imply.

    A library of a level may be called only where all its features are there: the compiler uses any of them anywhere.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]


_SSE = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _SSE | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_EIGHT_BIT = _V4 | {"avx512_vnni", "avx512vbmi"}
_BFLOAT16 = _EIGHT_BIT | {"avx512_bf16"}
_V4_FLAG, _EIGHT_BIT_FLAGS = "-march=x86-64-v4", ("-mavx512vnni", "-mavx512vbmi")
_AVX2 = Level("avx2", ("-march=x86-64-v3",), _V3)
_AVX512 = Level("avx512", (_V4_FLAG,), _V4)
_AVX512_VNNI = Level("avx512_vnni", (_V4_FLAG, *_EIGHT_BIT_FLAGS), _EIGHT_BIT)
# The one generation of processors that has these instructions without VBMI compiles its own library.
_AVX512_BF16 = Level("avx512_bf16", (_V4_FLAG, *_EIGHT_BIT_FLAGS, "-mavx512bf16"), _BFLOAT16)
_AMX = Level(
    "amx",
    (_V4_FLAG, *_EIGHT_BIT_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    _BFLOAT16 | {"amx_tile", "amx_bf16"},
)

LEVELS = {"bfloat16": (_AMX, _AVX512_BF16), "float32": (_AVX512_VNNI, _AVX512, _AVX2)}
"""The levels for which each folder of sources is compiled into the wheel, best first."""


@functools.lru_cache(maxsize=1)
def processor_features() -> frozenset[str]:
    """Return the processor's instruction sets as Linux names them; none on other systems and architectures."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
