"""The native CPU operators: which processor and compiler they need, and how their absence is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tolerance import assert_near

from fused_kv_kernels import RowPlan, row_attention, token_scores, why_not_native
from fused_kv_kernels.native import attention, library, native_library, row_attention_scratch, supports
from fused_kv_kernels.native.processor import processor_features
from fused_kv_kernels.reference import row_attention_reference, token_scores_reference
from fused_kv_kernels.scoring import Scoring

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
needs_float32 = pytest.mark.skipif(
    why_not_native(torch.float32) is not None, reason=f"no native operators: {why_not_native(torch.float32)}"
)
needs_processor = pytest.mark.skipif(
    "avx512_bf16" not in processor_features(), reason="the processor lacks avx512_bf16, so no library is ever built"
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
@needs_float32
def test_only_dense_tensors_of_one_dtype_on_the_cpu_are_taken() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(1, 2, 8, 16, dtype=dtype)
        assert supports(x, x)
        assert not supports(x, x.half())
        assert not supports(x.transpose(2, 3))
        assert not supports(x[..., :15])
        assert not supports(torch.zeros(8, 1026, dtype=dtype))
        assert native_library(dtype) is not None
    assert not supports(x, x.bfloat16())
    assert not supports(x.half())
    assert "bfloat16 and torch.float32 only" in str(why_not_native(torch.float16))
    # One panel of 64 packed keys and 64 packed values of 16 dimensions, two heads, two bytes each.
    assert row_attention_scratch(*[x.bfloat16()] * 3) == 2 * (64 + 64) * 16 * 2


@needs_native
def test_the_blocking_of_matrix_tiles_equals_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AMX is on few processors: here plain loops stand in for its instructions."""
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path))
    emulated = library.opened("bfloat16", "-DFKV_EMULATE_TILES")
    monkeypatch.setattr(attention, "loaded_library", lambda dtype: emulated)
    for q_heads, kv_heads, dim, num_keys, rows in ((9, 3, 64, 300, 17), (4, 4, 128, 70, 70), (2, 1, 96, 520, 90)):
        generator = torch.Generator().manual_seed(rows)
        q = torch.randn(2, q_heads, rows, dim, generator=generator).bfloat16()
        k, v = torch.randn(2, 2, kv_heads, num_keys, dim, generator=generator).bfloat16()
        positions = torch.randperm(num_keys, generator=generator)[:rows].sort().values
        scratch = torch.empty(attention.row_attention_scratch(q, k, v), dtype=torch.uint8)
        got = attention.native_row_attention(q, k, v, RowPlan(positions, num_keys), Scoring(dim**-0.5), scratch)
        want = row_attention_reference(q.float(), k.float(), v.float(), positions, dim**-0.5)
        assert_near(got, want, torch.bfloat16)


@needs_float32
def test_the_float32_operators_of_processors_without_avx512_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path))
    narrow = library.opened("float32", "-mno-avx512f")
    monkeypatch.setattr(attention, "loaded_library", lambda dtype: narrow)
    for q_heads, kv_heads, dim, num_keys, rows in ((9, 3, 64, 300, 17), (4, 4, 130, 70, 70), (2, 1, 96, 520, 90)):
        generator = torch.Generator().manual_seed(rows)
        q = torch.randn(2, q_heads, rows, dim, generator=generator)
        k, v = torch.randn(2, 2, kv_heads, num_keys, dim, generator=generator)
        positions = torch.randperm(num_keys, generator=generator)[:rows].sort().values
        got = row_attention(q, k, v, RowPlan(positions, num_keys), dim**-0.5)
        want = row_attention_reference(q, k, v, positions, dim**-0.5)
        assert_near(got, want, torch.float32)
        scores = token_scores(q[0], k[0], positions, dim**-0.5)
        torch.testing.assert_close(
            scores, token_scores_reference(q[0], k[0], positions, dim**-0.5), atol=1e-6, rtol=1e-5
        )


@needs_float32
def test_a_row_in_float32_does_not_depend_on_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: neither on the rows beside it nor on the number of threads that share the work."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 400, 64, generator=generator)
    k, v = torch.randn(2, 1, 2, 400, 64, generator=generator)
    positions = torch.arange(400)
    together = row_attention(q, k, v, RowPlan(positions, 400), 0.125)
    some = positions[7:393:11]
    assert torch.equal(row_attention(q[:, :, some], k, v, RowPlan(some, 400), 0.125), together[:, :, some])
    for threads in (1, 3, 64):
        monkeypatch.setattr(attention, "num_threads", lambda threads=threads: threads)
        assert torch.equal(row_attention(q, k, v, RowPlan(positions, 400), 0.125), together)


@needs_native
@needs_float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_library_that_computes_wrongly_is_found_out(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    built = native_library(dtype)
    assert built is not None
    assert library._agrees_with_torch(built, dtype, 2e-2)
    monkeypatch.setattr(library, "num_threads", lambda: 1)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, attn_mask: q + 1)
    assert not library._agrees_with_torch(built, dtype, 2e-2)
