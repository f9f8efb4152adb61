"""The kernels compile for devices that are not at hand, and keep to their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPILL_BYTES = 64
KERNELS = {
    "_add_kernel",
    "_combine_kernel",
    "_denominator_kernel",
    "_deviation_kernel",
    "_mass_kernel",
    "_paged_kernel",
    "_place_kernel",
    "_rerotate_kernel",
    "_row_attention_kernel",
    "_shift_kernel",
    "_sum_kernel",
}


@pytest.mark.parametrize(
    ("options", "matrix_instruction", "kernels"),
    [
        (["--capability", "90"], "HGMMA", KERNELS),
        (["--capability", "80", "--only-rows"], "HMMA", {"_row_attention_kernel"}),
    ],
    ids=["hopper", "ampere"],
)
def test_compiles(options: list[str], matrix_instruction: str, kernels: set[str], tmp_path: Path) -> None:
    script = Path(__file__).parent / "offline_compile.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *options],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in found} == kernels
    for kernel in found:
        assert kernel["stack_bytes"] <= SPILL_BYTES, kernel
    assert found[0][matrix_instruction] > 0
