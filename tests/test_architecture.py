"""The house stands: imports go one way, and every room's surface is what it says."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import fused_kv_llm

ROOT = Path(__file__).parent.parent
FLOORS = [
    {"fused_kv_kernels"},
    {"trace", "telemetry"},
    {"report_html"},
    {"errors", "report"},
    {"chunk", "config", "calibration"},
    {"store", "prompt", "model"},
    {"selectors", "catalog", "context_shift"},
    {"offline", "online"},
    {"engine"},
    {"adapter"},
    {
        "baseline",
        "calibrate",
        "demo",
        "cli",
        "cli_calibrate",
        "cli_layers",
        "cli_options",
        "cli_store",
        "layer_profile",
        "integrations",
    },
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
SURFACE = [
    "FusedKVEngine",
    "FusedKVError",
    "FusedKVWarning",
    "FusionReport",
    "Generation",
    "IngestReport",
    "Piece",
    "__version__",
]


def _room(module: str) -> str | None:
    """Return the room a dotted module name belongs to, or None for foreign ones and the package itself."""
    parts = module.split(".")
    if parts[0] == "fused_kv_kernels":
        return parts[0]
    if parts[0] in ("langchain_fused_kv", "llama_index_fused_kv"):
        return "integrations"
    return parts[1] if parts[0] == "fused_kv_llm" and len(parts) > 1 else None


def _modules() -> list[tuple[str, Path]]:
    found = []
    for base in (ROOT / "src", ROOT / "kernels", ROOT / "integrations"):
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def _imports(module: str, path: Path) -> set[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from fused_kv_llm import x` may name a room.
            names |= {f"{stem}.{alias.name}" for alias in node.names} if stem == "fused_kv_llm" else {stem}
    return names


@pytest.mark.parametrize(("module", "path"), _modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_down(module: str, path: Path) -> None:
    room = _room(module)
    if room is None:
        return
    assert room in FLOOR, f"{room} is not in the house plan"
    for name in _imports(module, path):
        other = _room(name)
        if other is None or other == room or other not in FLOOR:
            continue
        # demo is used by the command line, which stands on the same floor.
        same_floor_ok = FLOOR[room] == FLOOR[other] == len(FLOORS) - 1
        assert FLOOR[other] < FLOOR[room] or same_floor_ok, f"{module} imports {name}, which is not below it"


def test_no_import_cycles() -> None:
    graph = {module: {n for n in _imports(module, path) if _room(n)} for module, path in _modules()}
    names = set(graph)
    edges = {m: {n if n in names else n.rpartition(".")[0] for n in deps} & names - {m} for m, deps in graph.items()}
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != 1, f"import cycle: {' -> '.join((*trail, module))}"
        if state.get(module) == 2:
            return
        state[module] = 1
        for other in sorted(edges[module]):
            # A package's __init__ re-exports its own files; that is no cycle between files.
            if not (module.startswith(other + ".") or other.startswith(module + ".")):
                visit(other, (*trail, module))
        state[module] = 2

    for module in sorted(edges):
        visit(module, ())


def test_kernels_do_not_know_the_engine() -> None:
    for module, path in _modules():
        if module.startswith("fused_kv_kernels"):
            assert not any(name.startswith("fused_kv_llm") for name in _imports(module, path))


def test_public_surface_is_pinned() -> None:
    assert sorted(fused_kv_llm.__all__) == sorted(SURFACE)


def test_every_module_lists_what_it_exports() -> None:
    for info in pkgutil.walk_packages(fused_kv_llm.__path__, "fused_kv_llm."):
        module = importlib.import_module(info.name)
        assert hasattr(module, "__all__"), f"{info.name} has no __all__"
        for name in module.__all__:
            assert hasattr(module, name), f"{info.name}.__all__ names {name}, which is not there"


def test_no_print_and_no_assert_in_the_library() -> None:
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Assert), f"assert in {module}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                pytest.fail(f"print in {module}:{node.lineno}")
