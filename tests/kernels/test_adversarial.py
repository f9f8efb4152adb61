"""What nobody sends on purpose: positions beyond 32 bits, strides that overflow them, empty and doubled requests."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
import torch
from tolerance import assert_near

from fused_kv_kernels import (
    PageTable,
    RowPlan,
    SharedPages,
    batched_row_attention,
    paged_row_attention,
    row_attention,
    token_scores,
)
from fused_kv_kernels.reference import batched_row_attention_reference, token_scores_reference

INV_FREQ = torch.ones(8)


def test_positions_beyond_32_bits(device: torch.device) -> None:
    """Whoever hides a key puts it further away than any row: at the largest number there is."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator).to(device) for n in (3, 40, 40))
    stands = torch.arange(40, device=device)
    stands[[3, 17]], stands[20], stands[30] = torch.iinfo(torch.int64).max, 2**31, -(2**40)
    rows = torch.tensor([5, 39, 2**33], device=device)
    out, lse = batched_row_attention(q, k, v, rows, 0.25, kv_positions=stands)
    hidden = stands.clone()
    hidden[[3, 17]] = 2**40  # of the last row's, beyond 32 bits itself, no kernel need tell them
    want, want_lse = batched_row_attention_reference(q, k, v, rows, 0.25, kv_positions=hidden)
    assert_near(out[:, :, :2], want[:, :, :2], torch.float32)
    assert_near(lse[:, :, :2], want_lse[:, :, :2], torch.float32)
    without = batched_row_attention(q, k, v, rows, 0.25)[0]
    assert_near(without, batched_row_attention_reference(q, k, v, rows, 0.25)[0], torch.float32)


def test_rows_more_than_32_bits_apart(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("six GiB of address space, of which three rows are memory")
    step = 2**30 + 64
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (2 * step + 32)), dtype=torch.float16)
    q = memory.as_strided((1, 3, 32), (0, step, 1))
    q.copy_(torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)))
    k = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1)).half()
    positions = torch.tensor([3, 20, 39])
    want = token_scores_reference(q.float(), k.float(), positions, 0.2)
    assert_near(40 * token_scores(q, k, positions, 0.2), 40 * want, torch.float16)


@pytest.mark.parametrize("shape", [(1, 0, 10, 16), (1, 4, 10, 16)], ids=["none", "more_than_queries"])
def test_key_heads_that_query_heads_cannot_share(shape: tuple[int, ...]) -> None:
    q, k = torch.zeros(1, 2, 3, 16), torch.zeros(shape)
    positions = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match="do not fit together"):
        row_attention(q, k, k, RowPlan(positions, 10), 0.25)
    with pytest.raises(ValueError, match="do not fit together"):
        batched_row_attention(q, k, k, positions, 0.25)
    with pytest.raises(ValueError, match="do not fit together"):
        token_scores(q[0], k[0], positions, 0.25)
    pages = torch.zeros(1, shape[1], 16, 16)
    table = PageTable([[]], [[0]], 16, INV_FREQ)
    with pytest.raises(ValueError, match="do not fit together"):
        paged_row_attention(q, pages, pages, table, positions, 0.25)


def test_a_request_that_computes_nothing_takes_nothing(device: torch.device) -> None:
    table = PageTable([[SharedPages([1], 9, 0, 0)]], [[0]], 16, INV_FREQ, device)
    before = table.positions.clone()
    assert table.take(0, []).shape == (0, 2)
    assert torch.equal(table.positions, before)
    pages = torch.zeros(2, 1, 16, 16, device=device)
    out, lse = paged_row_attention(
        torch.zeros(1, 2, 0, 16, device=device),
        pages,
        pages,
        table,
        torch.empty(0, dtype=torch.int64, device=device),
        1.0,
    )
    assert out.shape == (1, 2, 0, 16)
    assert lse.shape == (1, 2, 0)


def test_pages_that_would_be_seen_twice_or_do_not_exist_are_refused() -> None:
    """A token at two slots would count twice in every softmax."""
    table = PageTable([[SharedPages([1], 9, 0, 0)]], [[0]], 16, INV_FREQ)
    with pytest.raises(ValueError, match=r"\[5, 6, 5\].*once"):
        table.take(0, [5, 6, 5])
    with pytest.raises(ValueError, match=r"-1.*negative"):
        table.take(0, [3, -1])
    assert table.take(0, range(16)).shape == (16, 2)
    with pytest.raises(ValueError, match="start=-3"):
        PageTable([[SharedPages([1], 9, -3, 0)]], [[0]], 16, INV_FREQ)
    with pytest.raises(ValueError, match="overlap"):
        PageTable([[SharedPages([1], 9, 0, 0), SharedPages([2], 9, 8, 0)]], [[0]], 16, INV_FREQ)
    pages, q = torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 1, 16)
    with pytest.raises(ValueError, match="page 1, but there are 1"):
        paged_row_attention(q, pages, pages, table, torch.tensor([9]), 1.0)


def test_sizes_of_a_request_compile_nothing_anew() -> None:
    """Triton would compile again where a number becomes 1 or divisible by 16: in decoding, at some token."""
    code = """
import importlib, pkgutil
import fused_kv_kernels.triton_ops as room
from triton.runtime.jit import JITFunction
sizes = {"rows", "keys", "splits", "work", "num_pages", "total_rows", "tokens", "positions", "chunks", "shifts"}
tensors = {("_paged_kernel", "positions"), ("_rerotate_kernel", "keys")}
for module in pkgutil.iter_modules(room.__path__):
    for name, kernel in vars(importlib.import_module(f"{room.__name__}.{module.name}")).items():
        if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
            for parameter in kernel.params:
                told = parameter.do_not_specialize or (name, parameter.name) in tensors
                if parameter.name in sizes and not told:
                    print(name, parameter.name)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]
