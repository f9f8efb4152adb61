"""Compiles the native CPU operators into the wheel, one library for each set of instructions they are used with.

``FUSED_KV_PREBUILT`` says whether: ``auto`` (default) where this is Linux on x86-64 with a C++ compiler, ``require``
fails where it is not, ``none`` leaves them out. A wheel without them is for any platform; its operators are compiled on
the machine that runs them. Editable installs never have them: their sources change.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["NativeLibraries"]

_INSIDE = "fused_kv_kernels/native"
_WAYS = ("auto", "require", "none")


class NativeLibraries(BuildHookInterface[Any]):
    """Adds ``fused_kv_kernels/native/prebuilt`` to a wheel, which is then for one platform."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the libraries included."""
        way = os.environ.get("FUSED_KV_PREBUILT", "auto")
        if way not in _WAYS:
            msg = f"FUSED_KV_PREBUILT={way!r}: choose one of {', '.join(_WAYS)}"
            raise ValueError(msg)
        if version == "editable" or way == "none":
            return
        try:
            libraries = self._compiled()
        except (OSError, subprocess.SubprocessError) as error:
            if way == "require":
                raise
            output = getattr(error, "stderr", None) or ""
            self.app.display_warning(f"The wheel gets no native libraries: {error} {output}".rstrip())
            return
        build_data["force_include"].update({str(path): f"{_INSIDE}/prebuilt/{path.name}" for path in libraries})
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it."""
        if self._folder is not None:
            self._folder.cleanup()

    def _compiled(self) -> list[Path]:
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            msg = f"they are for Linux on x86_64, this is {platform.system()} on {platform.machine()}"
            raise OSError(msg)
        native = Path(self.root) / "kernels" / _INSIDE
        # A package of this name whose __init__ does not run: that would import torch.
        package = types.ModuleType("native")
        package.__path__ = [str(native)]
        sys.modules["native"] = package
        build, levels = importlib.import_module("native.build"), importlib.import_module("native.processor").LEVELS
        self._folder = tempfile.TemporaryDirectory(prefix="fused-kv-prebuilt-")
        made = []
        for sources, folder_levels in levels.items():
            for level in folder_levels:
                made.append(Path(self._folder.name) / f"{sources}-{level.name}.so")
                build.compile_library(sources, made[-1], *level.flags)
        return made
