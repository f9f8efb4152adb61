"""What the wheel holds: every package with its marker of types, the sources of the native operators, one version."""

from __future__ import annotations

import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import fused_kv_llm

ROOT = Path(__file__).parents[1]
# The last ones are the web UI's.
SOURCES = {".py", ".cpp", ".h", ".html", ".js", ".css", ".svg"}
PACKAGES = ["fused_kv_kernels", "fused_kv_llm", "fused_kv_vllm", "langchain_fused_kv", "llama_index_fused_kv"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout; without native libraries, whose compilation takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSED_KV_PREBUILT", "none")
        (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return zipfile.ZipFile(built)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_that_it_has_types(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()
    assert f"{package}/__init__.py" in wheel.namelist()


def test_nothing_but_the_packages_is_installed(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {*PACKAGES, f"fused_kv_llm-{fused_kv_llm.__version__}.dist-info"}


def test_every_source_of_the_checkout_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    parents = [(ROOT / folder).parent for folder in folders]
    names = {next(str(path.relative_to(top)) for top in parents if path.is_relative_to(top)) for path in sources}
    assert len(names) > 100
    assert names <= set(wheel.namelist())


def test_the_metadata_have_the_version_that_is_written_once(wheel: zipfile.ZipFile) -> None:
    metadata = wheel.read(f"fused_kv_llm-{fused_kv_llm.__version__}.dist-info/METADATA").decode()
    assert Parser().parsestr(metadata)["Version"] == fused_kv_llm.__version__


def test_a_wheel_without_native_libraries_is_for_any_platform(wheel: zipfile.ZipFile) -> None:
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith(".so")]
