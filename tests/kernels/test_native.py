"""The native CPU operators: which processor and compiler they need, and how their absence is told."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fused_kv_kernels import why_not_native
from fused_kv_kernels.native import library, native_library, operators, row_attention_scratch, supports
from fused_kv_kernels.native.library import _processor_features
from fused_kv_kernels.reference import row_attention_reference

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
def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """One of them finds what is no library under the name, and makes it again."""
    environment = {**os.environ, "FUSED_KV_CACHE": str(tmp_path)}
    call = [sys.executable, "-c", SCRIPT]
    running = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [process.communicate()[0].splitlines()[:2] for process in running] == [["None", "0"]] * 2
    (built,) = (tmp_path / "native").iterdir()
    built.write_bytes(b"no library")
    assert _run(FUSED_KV_CACHE=str(tmp_path)).splitlines()[:2] == ["None", "0"]
    assert built.stat().st_size > 1000


@needs_native
def test_a_folder_that_cannot_be_written_is_told_and_does_without(tmp_path: Path) -> None:
    (tmp_path / "native").write_text("a file where the folder is to be")
    output = _run(FUSED_KV_CACHE=str(tmp_path), TMPDIR=str(tmp_path))
    assert output.splitlines()[0] == "None"
    assert "\n1 " in output
    assert "Set FUSED_KV_CACHE" in output
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


@needs_native
def test_only_dense_bfloat16_on_the_cpu_is_taken() -> None:
    x = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    assert supports(x)
    assert not supports(x.float())
    assert not supports(x.transpose(2, 3))
    assert not supports(x[..., :15])
    assert native_library() is not None
    # One panel of 64 packed keys and 64 packed values of 16 dimensions, two heads, two bytes each.
    assert row_attention_scratch(x) == 2 * (64 + 64) * 16 * 2


@needs_native
def test_the_blocking_of_matrix_tiles_equals_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AMX is on few processors: here plain loops stand in for its instructions."""
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path))
    emulated = library._declare(ctypes.CDLL(str(library._build("-DFKV_EMULATE_TILES"))))
    monkeypatch.setattr(operators, "native_library", lambda: emulated)
    for q_heads, kv_heads, dim, num_keys, rows in ((9, 3, 64, 300, 17), (4, 4, 128, 70, 70), (2, 1, 96, 520, 90)):
        generator = torch.Generator().manual_seed(rows)
        q = torch.randn(2, q_heads, rows, dim, generator=generator).bfloat16()
        k, v = torch.randn(2, 2, kv_heads, num_keys, dim, generator=generator).bfloat16()
        positions = torch.randperm(num_keys, generator=generator)[:rows].sort().values
        scratch = torch.empty(operators.row_attention_scratch(k), dtype=torch.uint8)
        got = operators.native_row_attention(q, k, v, positions, dim**-0.5, scratch)
        want = row_attention_reference(q.float(), k.float(), v.float(), positions, dim**-0.5)
        torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


@needs_native
def test_a_library_that_computes_wrongly_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    built = native_library()
    assert built is not None
    assert library._agrees_with_torch(built)
    monkeypatch.setattr(library, "num_threads", lambda: 1)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, attn_mask: q + 1)
    assert not library._agrees_with_torch(built)
