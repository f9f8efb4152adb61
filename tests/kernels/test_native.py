"""The native CPU operators: which processor and compiler they need, and how their absence is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from ctypes import CDLL
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tolerance import assert_near

from fused_kv_kernels import RowPlan, place_chunks, rotation_table, row_attention, token_scores, why_not_native
from fused_kv_kernels.native import attention, library, moving, native_library, row_attention_scratch, supports
from fused_kv_kernels.native.build import build
from fused_kv_kernels.native.processor import processor_features
from fused_kv_kernels.reference import place_chunks_reference, row_attention_reference, token_scores_reference
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


# Compiling takes ten seconds; what happens to files and between processes shows with a library that was made before.
COPYING_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec c++ --version
for target; do :; done
head -c 4096 '{built}' > "$target"; sleep 2; cp '{built}' "$target"
"""


@pytest.fixture
def copying_compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give a compiler that writes half of a library, waits, and writes all of it: the one that was built before."""
    compiler = tmp_path_factory.mktemp("compiler") / "copying"
    compiler.write_text(COPYING_COMPILER.format(built=build("bfloat16")))
    compiler.chmod(0o755)
    return str(compiler)


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
def test_the_library_is_built_once_and_private(tmp_path: Path, copying_compiler: str) -> None:
    first = _run(FUSED_KV_CACHE=str(tmp_path), CXX=copying_compiler)
    (built,) = (tmp_path / "native").iterdir()
    changed = built.stat().st_mtime_ns
    assert first.splitlines()[0] == _run(FUSED_KV_CACHE=str(tmp_path), CXX=copying_compiler).splitlines()[0] == "None"
    assert [p.stat().st_mtime_ns for p in (tmp_path / "native").iterdir()] == [changed]
    assert built.parent.stat().st_mode & 0o077 == 0


@needs_native
@pytest.mark.skipif(shutil.which("gcc") is None or sys.platform != "linux", reason="no gcc")
@pytest.mark.heavy
def test_a_c_compiler_under_cxx_links_the_library_of_cpp(tmp_path: Path) -> None:
    assert _run(FUSED_KV_CACHE=str(tmp_path), CXX="gcc").splitlines()[0] == "None"


@needs_native
def test_processes_that_build_at_once_do_not_disturb_each_other(tmp_path: Path, copying_compiler: str) -> None:
    """Another finds what is no library under the name, and makes it again."""
    environment = {**os.environ, "FUSED_KV_CACHE": str(tmp_path), "CXX": copying_compiler}
    call = [sys.executable, "-c", SCRIPT]
    running = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [process.communicate()[0].splitlines()[:2] for process in running] == [["None", "0"]] * 2
    (built,) = (tmp_path / "native").iterdir()
    built.write_bytes(b"no library")
    assert _run(FUSED_KV_CACHE=str(tmp_path), CXX=copying_compiler).splitlines()[:2] == ["None", "0"]
    assert built.stat().st_size > 1000


@needs_native
def test_a_folder_that_cannot_be_written_is_told_and_does_without(tmp_path: Path, copying_compiler: str) -> None:
    (tmp_path / "native").write_text("a file where the folder is to be")
    output = _run(FUSED_KV_CACHE=str(tmp_path), TMPDIR=str(tmp_path), CXX=copying_compiler)
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


# Heads of queries and of keys, widths of keys and of values, keys, rows, and how many keys a window has.
SHAPES = ((9, 3, 64, 64, 300, 17, None), (4, 4, 128, 96, 70, 70, 30), (2, 1, 96, 96, 520, 90, 200))
SCORINGS = (Scoring(0.125), Scoring(0.125, softcap=2.0), Scoring(0.125, 5.0, torch.linspace(-3.0, 4.0, 9)))


def _rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RowPlan]:
    q_heads, kv_heads, dim, value_dim, num_keys, rows, window = shape
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(2, q_heads, rows, dim, generator=generator).to(dtype)
    k, v = (torch.randn(2, kv_heads, num_keys, width, generator=generator).to(dtype) for width in (dim, value_dim))
    positions = torch.randperm(num_keys, generator=generator)[:rows].sort().values
    first_keys = None if window is None else (positions - window + 1).clamp(min=0)
    return q, k, v, RowPlan(positions, num_keys, first_keys=first_keys)


def _options(scoring: Scoring, q_heads: int, plan: RowPlan) -> dict[str, Any]:
    sinks = None if scoring.sinks is None else scoring.sinks[:q_heads]
    return {"first_keys": plan.first_keys, "softcap": scoring.softcap, "sinks": sinks}


@needs_native
@pytest.mark.heavy
def test_the_blocking_of_matrix_tiles_equals_the_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AMX is on few processors: here plain loops stand in for its instructions."""
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path))
    emulated = library.opened("bfloat16", "-DFKV_EMULATE_TILES")
    monkeypatch.setattr(attention, "loaded_library", lambda dtype: emulated)
    for shape, scoring in product(SHAPES, SCORINGS):
        q, k, v, plan = _rows(shape, torch.bfloat16)
        options = _options(scoring, q.shape[1], plan)
        scratch = torch.empty(attention.row_attention_scratch(q, k, v), dtype=torch.uint8)
        own = Scoring(scoring.scale, scoring.softcap, options["sinks"])
        got = attention.native_row_attention(q, k, v, plan, own, scratch)
        wide = (part.float() for part in (q, k, v))
        assert_near(got, row_attention_reference(*wide, plan.q_positions, scoring.scale, **options), torch.bfloat16)


@needs_float32
def test_the_float32_operators_of_processors_without_avx512_equal_the_reference(
    float32_without_avx512: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "loaded_library", lambda dtype: float32_without_avx512)
    monkeypatch.setattr(moving, "loaded_library", lambda dtype: float32_without_avx512)
    for shape, scoring in product((*SHAPES, (4, 4, 130, 130, 70, 70, None)), SCORINGS):
        q, k, v, plan = _rows(shape, torch.float32)
        options = _options(scoring, q.shape[1], plan)
        own = {name: options[name] for name in ("softcap", "sinks")}
        got = row_attention(q, k, v, plan, scoring.scale, **own)
        want = row_attention_reference(q, k, v, plan.q_positions, scoring.scale, **options)
        assert_near(got, want, torch.float32)
        scores = token_scores(q[0], k[0], plan.q_positions, scoring.scale, **options)
        want = token_scores_reference(q[0], k[0], plan.q_positions, scoring.scale, **options)
        torch.testing.assert_close(scores, want, atol=1e-6, rtol=1e-5)
    for interleaved, rotary in product((False, True), (64, 22)):
        keys, values = torch.randn(2, 3, 11, 64)
        inv_freq = torch.linspace(-0.3, 0.9, rotary // 2)
        layers = torch.zeros(2, 2, 3, 20, 64)
        place_chunks([(keys, values)], [4], rotation_table(torch.tensor([9]), inv_freq, interleaved), *layers[0])
        place_chunks_reference([(keys, values)], [4], [9], inv_freq, *layers[1], interleaved=interleaved)
        assert_near(layers[0], layers[1], torch.float32)


@needs_float32
@pytest.mark.parametrize("window", [None, 130])
def test_a_row_in_float32_does_not_depend_on_its_company(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: neither on the rows beside it nor on the number of threads that share the work."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 400, 64, generator=generator)
    k, v = torch.randn(2, 1, 2, 400, 64, generator=generator)
    positions = torch.arange(400)

    def attended(rows: torch.Tensor) -> torch.Tensor:
        first_keys = None if window is None else (rows - window + 1).clamp(min=0)
        return row_attention(q[:, :, rows], k, v, RowPlan(rows, 400, first_keys=first_keys), 0.125)

    together = attended(positions)
    some = positions[7:393:11]
    assert torch.equal(attended(some), together[:, :, some])
    for threads in (1, 3, 64):
        monkeypatch.setattr(attention, "num_threads", lambda threads=threads: threads)
        assert torch.equal(attended(positions), together)


@needs_native
@needs_float32
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_library_that_computes_wrongly_is_found_out(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    built = native_library(dtype)
    assert built is not None
    assert library._agrees_with_torch(built, dtype, 2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert library._agrees_with_torch(built, dtype, 2e-2), "whatever the first caller computes in"
    monkeypatch.setattr(library, "num_threads", lambda: 1)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, attn_mask: q + 1)
    assert not library._agrees_with_torch(built, dtype, 2e-2)
