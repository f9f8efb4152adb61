"""``fused-kv demo --web``: the web UI over the handbook."""

from __future__ import annotations

from pathlib import Path

from rich.markup import escape

from fused_kv_llm.cli.serve import check_packages, say_where
from fused_kv_llm.cli.terminal import doing, out, quiet_libraries
from fused_kv_llm.config import DEFAULT_MODEL

__all__ = ["serve_demo"]


def serve_demo(kv_dir: Path | None, questions: int, ratio: float, port: int) -> None:
    """Serve the handbook of a fictional ferry company, with questions that wait to be asked.

    Parameters
    ----------
    kv_dir : Path or None
        None takes a folder in the user's cache.
    questions : int
        How many are prepared.
    ratio : float
        Recompute ratio, 0 to 1.
    port : int
        0 takes one that is free.
    """
    check_packages()
    from fused_kv_llm.demo import handbook_folder, handbook_questions
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.paths import cache_folder
    from fused_kv_llm.server import ServerConfig, serve

    quiet_libraries()
    folder = kv_dir or cache_folder() / "demo-kv"
    prepared = tuple(entry["question"] for entry in handbook_questions()[:questions])
    with doing(f"Loading {DEFAULT_MODEL}"):
        engine = FusedKVEngine(DEFAULT_MODEL, kv_dir=folder, recompute_ratio=ratio)
    with engine:
        out.print(f"[dim]{escape(DEFAULT_MODEL)}: {escape(engine.choice)}[/]", highlight=False)
        out.print("The handbook is ingested file by file; what is ready can be asked about. Ctrl-C ends the demo.")
        files = sorted(handbook_folder().iterdir())
        serve(engine, ServerConfig(port=port, questions=prepared), documents=files, on_started=say_where)
