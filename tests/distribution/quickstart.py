"""Runs the README's Python blocks with an installed wheel: in an empty folder, without a compiler or a checkout.

python -I quickstart.py README.md dist/fused_kv_llm-<version>-<platform>.whl
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUBJECT = "Aldebaran"


def main() -> None:
    """Check the wheel, run the blocks, and check where the native operators came from."""
    readme, wheel = (Path(name).resolve() for name in sys.argv[1:])
    prebuilt = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    if (platform.system(), platform.machine()) == ("Linux", "x86_64") and not prebuilt:
        sys.exit(f"{wheel.name} has no native libraries: is there a C++ compiler?")
    blocks = BLOCK.findall(readme.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ |= {"PATH": "", "CXX": "", "FUSED_KV_CACHE": f"{folder}/cache"}
        for number, block in enumerate(blocks, start=1):
            done = subprocess.run([sys.executable, "-I", "-c", block], capture_output=True, text=True, check=False)
            print(f"--- block {number} of {len(blocks)}\n{done.stdout}", flush=True)
            if done.returncode or SUBJECT not in done.stdout:
                sys.exit(f"block {number} of {readme.name} failed, or its answer lacks {SUBJECT}\n{done.stderr}")
        check_native(bool(prebuilt))
        if Path("cache/native").exists():
            sys.exit("something was compiled, without a compiler")
    command = Path(sys.executable).parent / "fused-kv"
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)


def check_native(has_prebuilt: bool) -> None:
    """Fail if the wheel's libraries are not used where the processor could run them."""
    import torch

    import fused_kv_llm
    from fused_kv_kernels import why_not_native

    if not Path(fused_kv_llm.__file__).is_relative_to(sys.prefix):
        sys.exit(f"fused_kv_llm came from {fused_kv_llm.__file__}, not from the wheel")
    for dtype in (torch.bfloat16, torch.float32):
        reason = why_not_native(dtype)
        print(f"native operators, {dtype}: {reason or 'prebuilt'}")
        if has_prebuilt and reason and not reason.startswith("the processor lacks"):
            sys.exit(f"the wheel's native operators are not used: {reason}")


if __name__ == "__main__":
    main()
