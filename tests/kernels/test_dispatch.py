"""Which implementation runs, and what is refused."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_kv_kernels import rerotate_keys, rotation_table
from fused_kv_kernels.dispatch import UnsupportedOperandsError, triton_op, use_triton
from fused_kv_kernels.rotate import rotate_in_torch


def test_plain_torch_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_KV_KERNELS", raising=False)
    assert not use_triton("row attention", q=torch.zeros(1, 1, 1, 16))


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 1, 1, 16)
    monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_triton("row attention", q=q)
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    assert not use_triton("row attention", q=q)
    monkeypatch.setenv("FUSED_KV_KERNELS", "cuda")
    with pytest.raises(ValueError, match="FUSED_KV_KERNELS='cuda'"):
        use_triton("row attention", q=q)


def test_triton_without_a_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedOperandsError, match=r"CUDA device.*q: float32 \[1, 1, 1, 16\] on cpu"):
        use_triton("row attention", q=torch.zeros(1, 1, 1, 16))


def test_operands_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedOperandsError, match="must all be float32"):
        use_triton("row attention", q=q, k=k)
    with pytest.raises(UnsupportedOperandsError, match="last axis"):
        use_triton("row attention", q=torch.zeros(1, 1, 16, 4).transpose(2, 3))


@pytest.mark.parametrize(
    ("capability", "dtype", "taken"),
    [
        ((9, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, True),
        ((7, 5), torch.float16, True),
        ((7, 5), torch.bfloat16, False),
        ((7, 0), torch.float16, False),
    ],
    ids=str,
)
def test_devices_that_are_too_old(
    capability: tuple[int, int], dtype: torch.dtype, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors that claim to be on a GPU."""
    monkeypatch.delenv("FUSED_KV_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        q = torch.empty(1, 1, 1, 16, dtype=dtype, device="cuda:0")
        if taken:
            assert use_triton("row attention", q=q)
            return
        name = str(dtype).removeprefix("torch.")
        pattern = rf"for {name}, and cuda:0 has {capability[0]}\.{capability[1]} .*q: {name} \[1, 1, 1, 16\] on cuda:0"
        with pytest.raises(UnsupportedOperandsError, match=pattern):
            use_triton("row attention", q=q)


def test_positions_are_where_the_operands_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSED_KV_KERNELS", raising=False)
    with FakeTensorMode():
        q = torch.empty(1, 1, 1, 16, device="cuda:0")
        with pytest.raises(UnsupportedOperandsError, match="its positions are on cpu"):
            use_triton("row attention", torch.arange(1), None, q=q)


def test_kernels_are_launched_on_their_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which need not be the one that the tensors are on."""
    entered: list[object] = []

    @contextlib.contextmanager
    def guard(device: object) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "device", guard)
    from fused_kv_kernels.triton_ops import kv_deviation as room

    monkeypatch.setattr(room, "kv_deviation", lambda: entered.append("ran"))
    triton_op("kv_deviation", torch.device("cuda:1"))()
    assert entered == [torch.device("cuda:1"), "ran", "left"]


def test_threads_take_turns_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter replaces methods of Triton's classes while a kernel runs, for every thread."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled natively in this process")
    monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    keys, table = torch.randn(4, 64, 32), rotation_table(torch.arange(64), torch.rand(16))
    want = rotate_in_torch(keys, table.cos, table.sin)
    try:
        with ThreadPoolExecutor(4) as pool:
            for rotated in pool.map(lambda _: rerotate_keys(keys, table), range(12)):
                torch.testing.assert_close(rotated, want)
    finally:
        sys.setswitchinterval(interval)


def test_importing_the_package_imports_neither_triton_nor_the_engine() -> None:
    code = (
        "import sys, fused_kv_kernels\n"
        "sys.exit(any(name.split('.')[0] in ('triton', 'fused_kv_llm', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
