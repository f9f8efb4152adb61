"""The layers whose attention finds answers best, by model (QCFuse section 3.4).

``critical_layers.json`` beside this file has the profiles that come with the package and how they were made; profiles
of ``fused-kv calibrate layers`` are kept in the user's cache folder and come first. So are the anchors that ``fused-kv
calibrate anchors`` has chosen for a model (section 3.3.1, figure 6).
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from fused_kv_llm.paths import cache_folder, write_atomically

from .views import Anchors

__all__ = ["anchors_of", "critical_layers", "profile_path", "save_anchors", "save_profile"]


def profile_path(fingerprint: str) -> Path:
    """Return where the user's own profile of a model is kept."""
    return cache_folder() / "critical_layers" / f"{fingerprint}.json"


def save_profile(fingerprint: str, profile: dict[str, Any]) -> Path:
    """Keep a profile; ``profile["layers"]`` are the critical layers. Returns its path."""
    path = profile_path(fingerprint)
    write_atomically(path, (json.dumps({"fingerprint": fingerprint, **profile}, indent=1) + "\n").encode())
    return path


def critical_layers(fingerprint: str, num_layers: int) -> tuple[tuple[int, ...], bool]:
    """Return a model's critical layers, ascending, and whether they were profiled.

    Parameters
    ----------
    fingerprint : str
        Of the model's weights.
    num_layers : int
        Without a profile the three layers in the middle stand in, where QCFuse's profiles of four models peak.
    """
    path = profile_path(fingerprint)
    profiles = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    layers = profiles["layers"] if profiles is not None else _shipped().get(fingerprint)
    if layers is None:
        middle = num_layers // 2
        return tuple(sorted({max(0, middle - 1), middle, min(num_layers - 1, middle + 1)})), False
    return tuple(sorted(layer for layer in layers if layer < num_layers)), True


def anchors_of(fingerprint: str) -> Anchors | None:
    """Return the anchors that were profiled for a model; None if none were."""
    path = _anchors_path(fingerprint)
    if not path.is_file():
        return None
    profile = json.loads(path.read_text(encoding="utf-8"))
    return Anchors(profile["rule"], profile["ratio"])


def save_anchors(fingerprint: str, profile: dict[str, Any]) -> Path:
    """Keep a profile of anchors; ``profile["rule"]`` and ``profile["ratio"]`` are used. Returns its path."""
    path = _anchors_path(fingerprint)
    write_atomically(path, (json.dumps({"fingerprint": fingerprint, **profile}, indent=1) + "\n").encode())
    return path


def _anchors_path(fingerprint: str) -> Path:
    return cache_folder() / "anchors" / f"{fingerprint}.json"


def _shipped() -> dict[str, list[int]]:
    text = (files("fused_kv_llm.selectors") / "critical_layers.json").read_text(encoding="utf-8")
    return {name: profile["layers"] for profile in json.loads(text) for name in profile["fingerprints"]}
