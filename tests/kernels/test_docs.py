"""The code of docs/kernels.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    # One after the other, as a reader would type them.
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})


def test_every_operator_is_described() -> None:
    import fused_kv_kernels

    text = PAGE.read_text(encoding="utf-8")
    assert not {name for name in fused_kv_kernels.__all__ if name not in text} - {"TransferPlan", "why_not_native"}
