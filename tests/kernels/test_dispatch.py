"""Which implementation runs, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fused_kv_kernels.dispatch import UnsupportedOperandsError, use_triton


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


def test_importing_the_package_imports_neither_triton_nor_the_engine() -> None:
    code = (
        "import sys, fused_kv_kernels\n"
        "sys.exit(any(name.split('.')[0] in ('triton', 'fused_kv_llm', 'transformers') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
