"""Native libraries that come with the wheel: which one runs where, and what happens where none does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fused_kv_kernels import why_not_native
from fused_kv_kernels.native import library, loading
from fused_kv_kernels.native.build import compile_library
from fused_kv_kernels.native.processor import LEVELS, Level, processor_features

needs_float32 = pytest.mark.skipif(
    why_not_native(torch.float32) is not None, reason=f"no native operators: {why_not_native(torch.float32)}"
)


def test_a_prebuilt_library_is_for_the_best_level_that_the_processor_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    amx, avx512_bf16 = LEVELS["bfloat16"]
    for level in (amx, avx512_bf16):
        (tmp_path / f"bfloat16-{level.name}.so").touch()
    for features, name in (
        (amx.features, "bfloat16-amx.so"),
        (amx.features - {"amx_tile"}, "bfloat16-avx512_bf16.so"),
        (avx512_bf16.features | {"sha_ni"}, "bfloat16-avx512_bf16.so"),
    ):
        monkeypatch.setattr(loading, "processor_features", lambda features=features: features)
        assert loading.prebuilt_library("bfloat16") == tmp_path / name
    (tmp_path / "bfloat16-amx.so").unlink()
    monkeypatch.setattr(loading, "processor_features", lambda: amx.features)
    assert loading.prebuilt_library("bfloat16") == tmp_path / "bfloat16-avx512_bf16.so"


@pytest.mark.parametrize(
    ("level", "feature"), [(level, feature) for level in LEVELS["bfloat16"] for feature in sorted(level.features)]
)
def test_no_prebuilt_library_runs_where_one_of_its_instructions_is_missing(
    level: Level, feature: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"bfloat16-{level.name}.so").touch()
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    monkeypatch.setattr(loading, "processor_features", lambda: level.features - {feature})
    assert loading.prebuilt_library("bfloat16") is None


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, whose macros say what a level allows")
@pytest.mark.parametrize(
    "level",
    sorted({level for levels in LEVELS.values() for level in levels}, key=lambda level: level.name),
    ids=lambda level: level.name,
)
def test_a_level_names_every_instruction_set_that_its_flags_allow(level: Level) -> None:
    """Linux' name of each set that the compiler may use; those that all 64-bit processors have stand under none."""
    names = {
        "__AVX512F__": "avx512f", "__AVX512BW__": "avx512bw", "__AVX512CD__": "avx512cd", "__AVX512DQ__": "avx512dq",
        "__AVX512VL__": "avx512vl", "__AVX512VNNI__": "avx512_vnni", "__AVX512VBMI__": "avx512vbmi",
        "__AVX512BF16__": "avx512_bf16", "__AMX_TILE__": "amx_tile",
        "__AMX_BF16__": "amx_bf16", "__AVX__": "avx", "__AVX2__": "avx2", "__BMI__": "bmi1", "__BMI2__": "bmi2",
        "__F16C__": "f16c", "__FMA__": "fma", "__LZCNT__": "abm", "__MOVBE__": "movbe", "__XSAVE__": "xsave",
        "__SSE3__": "pni", "__SSSE3__": "ssse3", "__SSE4_1__": "sse4_1", "__SSE4_2__": "sse4_2",
        "__POPCNT__": "popcnt", "__LAHF_SAHF__": "lahf_lm", "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    }  # fmt: skip

    def sets(*flags: str) -> set[str]:
        command = ["g++", *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
        macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {line.split()[1] for line in macros.splitlines()}

    allowed = sets(*level.flags) - sets("-march=x86-64")
    # CRC32 is part of SSE 4.2; the others say how the sets are used.
    named = {name for name in allowed if not name.startswith(("__CRC32", "__EVEX", "__FP_FAST"))}
    assert {names.get(name, name) for name in named} == level.features


@needs_float32
@pytest.mark.heavy
def test_a_prebuilt_library_is_used_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And one that is none leads to the compiler."""
    level = next(level for level in LEVELS["float32"] if level.features <= processor_features())
    compile_library("float32", tmp_path / f"float32-{level.name}.so", *level.flags)
    monkeypatch.setattr(loading, "PREBUILT", tmp_path)
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        patch.setenv("CXX", "")
        opened = library.opened("float32")
    assert library._agrees_with_torch(opened, torch.float32, 1e-5)
    assert not (tmp_path / "cache").exists()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / f"float32-{level.name}.so").write_bytes(b"no library")
    monkeypatch.setattr(loading, "PREBUILT", broken)
    assert library._agrees_with_torch(library.opened("float32"), torch.float32, 1e-5)
    assert len(list((tmp_path / "cache" / "native").glob("float32-*.so"))) == 1
