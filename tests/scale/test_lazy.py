"""Nothing imports Ray before it is used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fused_kv_llm import scale
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.scale import ActorResources, build_kv_cache_distributed

_HEAVY = "('ray', 'torch', 'pyarrow', 'pandas')"


@pytest.mark.parametrize("module", ["fused_kv_llm", "fused_kv_llm.scale", "fused_kv_llm.cli"])
def test_importing_the_library_imports_no_ray(module: str) -> None:
    told = f"import {module}, sys; print([name for name in {_HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_not_even_the_engine_or_the_ingestion_imports_ray() -> None:
    told = (
        "import fused_kv_llm.engine, fused_kv_llm.scale.ingestion, fused_kv_llm.scale.neighbours; import sys; "
        "print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_room_has_what_it_lists() -> None:
    assert all(hasattr(scale, name) for name in scale.__all__)
    with pytest.raises(AttributeError, match="nothing_of_it"):
        _ = scale.nothing_of_it


def test_resources_are_checked() -> None:
    for wrong in ({"count": 0}, {"count": True}, {"cpus": 0}, {"gpus": -1}):
        with pytest.raises(ConfigError):
            ActorResources(**wrong)  # type: ignore[arg-type]
    cluster = {"CPU": 8.0, "GPU": 2.0}
    assert ActorResources().fitting(cluster) == 8
    assert ActorResources(cpus=3).fitting(cluster) == 2
    assert ActorResources(gpus=0.5).fitting(cluster) == 4
    assert ActorResources(5, gpus=1).fitting(cluster) == 5
    with pytest.raises(ConfigError, match="No actor"):
        ActorResources(gpus=4).fitting(cluster)


def test_the_example_of_the_documentation_has_arguments_that_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    code = re.search(r"```text\n(from pathlib.*?)```", page, re.DOTALL)
    assert code is not None
    calls = [node for node in ast.walk(ast.parse(code[1])) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if ast.unparse(node.func) == "build_kv_cache_distributed"]
    known = inspect.signature(build_kv_cache_distributed).parameters
    assert {keyword.arg for keyword in call.keywords} <= known.keys()
