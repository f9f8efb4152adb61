"""The native CPU operators: which processor and compiler they need, and how their absence is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_kv_kernels import why_not_native
from fused_kv_kernels.native import native_library, row_attention_scratch, supports
from fused_kv_kernels.native.library import _processor_features

SCRIPT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from fused_kv_kernels import why_not_native
    print(why_not_native())
    why_not_native()
print(len(caught), *(str(w.message) for w in caught))
"""

needs_native = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
needs_processor = pytest.mark.skipif(
    "avx512_bf16" not in _processor_features(), reason="the processor lacks avx512_bf16, so no library is ever built"
)


def _run(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


def test_the_environment_turns_them_off() -> None:
    assert _run(FUSED_KV_KERNELS="torch").splitlines() == ["FUSED_KV_KERNELS=torch", "0"]


@needs_processor
def test_a_missing_compiler_is_told_once_and_how_to_mend_it(tmp_path: Path) -> None:
    output = _run(PATH=str(tmp_path), CXX="", FUSED_KV_CACHE=str(tmp_path))
    assert "no C++ compiler found" in output.splitlines()[0]
    assert "\n1 " in output
    assert "Install a C++ compiler" in output


@needs_processor
def test_a_compiler_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit\necho no such header >&2; exit 1\n')
    compiler.chmod(0o755)
    output = _run(CXX=str(compiler), FUSED_KV_CACHE=str(tmp_path / "cache"))
    assert "no such header" in output.splitlines()[0]
    assert not list((tmp_path / "cache" / "native").glob("*.so"))


@needs_native
def test_the_library_is_built_once_and_private(tmp_path: Path) -> None:
    first = _run(FUSED_KV_CACHE=str(tmp_path))
    (built,) = (tmp_path / "native").iterdir()
    changed = built.stat().st_mtime_ns
    assert first.splitlines()[0] == _run(FUSED_KV_CACHE=str(tmp_path)).splitlines()[0] == "None"
    assert [p.stat().st_mtime_ns for p in (tmp_path / "native").iterdir()] == [changed]
    assert built.parent.stat().st_mode & 0o077 == 0


@needs_native
def test_only_dense_bfloat16_on_the_cpu_is_taken() -> None:
    x = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert supports(x)
    assert not supports(x.float())
    assert not supports(x.transpose(2, 3))
    assert not supports(x[..., :15])
    assert native_library() is not None
    # 64 packed keys of 16 dimensions, and 8 packed values of 16, two heads, two bytes each.
    assert row_attention_scratch(x) == 2 * (64 + 8) * 16 * 2
