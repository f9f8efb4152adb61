"""The kernels compile for devices that are not at hand, and keep to their registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

SPILL_BYTES = 64
# Of one program, by compute capability; of those from 8.0 on, cards of 8.6 and 8.9 have least.
SHARED_BYTES = {"90": 227 * 1024, "80": 99 * 1024}
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
    ("options", "matrix_instruction", "kernels", "spill_bytes"),
    [
        (["--capability", "90"], "HGMMA", KERNELS, SPILL_BYTES),
        (["--capability", "80", "--only", "rows"], "HMMA", {"_row_attention_kernel"}, SPILL_BYTES),
        # Pages of float32 and 256 dimensions are the largest blocks there are; their products spill.
        (
            ["--capability", "80", "--only", "pages", "--dtype", "float32", "--dim", "256"],
            None,
            {"_paged_kernel", "_combine_kernel"},
            1024,
        ),
    ],
    ids=["hopper", "ampere", "ampere_float32_pages"],
)
def test_compiles(
    options: list[str], matrix_instruction: str | None, kernels: set[str], spill_bytes: int, tmp_path: Path
) -> None:
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
        assert kernel["stack_bytes"] <= spill_bytes, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[options[1]], kernel
    assert matrix_instruction is None or found[0][matrix_instruction] > 0
