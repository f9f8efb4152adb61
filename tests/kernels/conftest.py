"""The device that kernels are tested on, and native operators for an older processor than this."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from ctypes import CDLL

import pytest
import torch

from fused_kv_kernels import rounded_weights
from fused_kv_kernels.native import attention, byte_sizes
from fused_kv_kernels.native.processor import processor_features


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Give the device to make tensors on, with Triton in charge and fresh memory full of NaN."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.fail("this test needs a CUDA device")
    if request.param == "interpreter" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled natively in this process")
    monkeypatch.setenv("FUSED_KV_KERNELS", "triton")
    real_empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        fresh = real_empty(*args, **kwargs)  # type: ignore[call-overload]
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    monkeypatch.setattr(torch, "empty", poisoned)
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(scope="session")
def float32_without_avx512(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """Compile the float32 operators once for all tests of processors without AVX-512."""
    from fused_kv_kernels.native import library

    base = tmp_path_factory.getbasetemp()
    # Processes that test side by side have their folders in one, and build once.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "without_avx512"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_KV_CACHE", str(folder))
        return library.opened("float32", "-mno-avx512f")


@pytest.fixture(scope="module", params=["own", "avx2"])
def byte_instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Multiply bytes of float32 models with the processor's best instructions, and with AVX2 alone; give which."""
    if request.param == "own":
        yield request.param
        return
    if "avx512f" not in processor_features():
        pytest.skip("these are the processor's own")
    avx2 = request.getfixturevalue("float32_without_avx512")
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, sys.modules[byte_sizes.__module__]):
            real = module.loaded_library
            patch.setattr(
                module, "loaded_library", lambda dtype, of=real: avx2 if dtype == torch.float32 else of(dtype)
            )
        patch.setattr(rounded_weights, "_largest_weight", lambda: 63)
        yield request.param
