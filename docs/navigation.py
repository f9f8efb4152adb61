"""A hook of the documentation's build: the navigation lists those pages that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Drop entries without a page."""
    config.nav = _present(config.nav, Path(config.docs_dir))
    return config


def _present(entries: list[Any], folder: Path) -> list[Any]:
    kept = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _present(target, folder)})
        elif (folder / target).is_file():
            kept.append(entry)
    return kept
