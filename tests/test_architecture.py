"""The house stands: imports go one way, through the face of a room, and every room's surface is what it says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fused_kv_llm

ROOT = Path(__file__).parent.parent
BASES = {
    "fused_kv_llm": ROOT / "src",
    "fused_kv_kernels": ROOT / "kernels",
    "fused_kv_vllm": ROOT / "integrations",
    "langchain_fused_kv": ROOT / "integrations",
    "llama_index_fused_kv": ROOT / "integrations",
}
# Lowest first. A room imports from lower floors only; rooms of one floor do not know each other.
FLOORS = [
    {"fused_kv_kernels"},
    {"errors", "report"},
    {"chunk", "config", "context_shift", "paths", "reading_lock", "thread_pool"},
    {"store", "prompt", "model"},
    {"selectors", "decoding", "catalog", "kv", "retrieval"},
    {"verdicts"},
    {"offline", "online"},
    {"serving"},
    {"engine"},
    {"adapter", "tuning"},
    {"demo"},
    {"server"},
    {"scale"},
    {"cli", "fused_kv_vllm", "langchain_fused_kv", "llama_index_fused_kv"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Inside the store, the same rule holds between its rooms; the modules beside them put the rooms together.
STORE_FLOORS = [{"format", "remote"}, {"folder"}, {"index"}, {"read"}, {"audit"}]
# Subclasses of Ray's classes; nothing imports them before Ray is used.
NEED_RAY = {"fused_kv_llm.scale.router"}
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


class Import(NamedTuple):
    """One imported name: ``from target import name``, or ``import target`` with an empty name."""

    module: str
    target: str
    name: str
    line: int
    for_types: bool


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for name, base in BASES.items():
        for path in sorted((base / name).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _imports() -> tuple[Import, ...]:
    return tuple(one for module, path in _modules().items() for one in _imports_of(module, path))


def _imports_of(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {node for block in blocks for statement in block.body for node in ast.walk(statement)}
    for node in ast.walk(tree):
        for_types = node in typed
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, "", node.lineno, for_types)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")
            base = up[: len(up) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from package import module` imports the module, unless the package's face has that name.
                inner = f"{target}.{alias.name}"
                is_module = inner in _modules() and alias.name not in _face(target)
                yield Import(module, inner if is_module else target, alias.name, node.lineno, for_types)


@cache
def _face(package: str) -> frozenset[str]:
    """Return the names that a package's ``__init__`` lists in ``__all__``."""
    for node in ast.parse(_modules()[package].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _ours() -> list[Import]:
    return [one for one in _imports() if one.target.split(".")[0] in BASES]


def _room(module: str) -> str:
    """Return the room of a dotted module name; the package itself is its own, topmost room."""
    parts = module.split(".")
    if parts[0] != "fused_kv_llm":
        return parts[0]
    return parts[1] if len(parts) > 1 else "fused_kv_llm"


def _is_package(module: str) -> bool:
    return _modules()[module].name == "__init__.py"


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _face_passed(one: Import) -> str | None:
    """Return the outermost package whose inside an import from outside reaches into, past its ``__init__``."""
    parts = one.target.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if depth == 1 and parts[0] == "fused_kv_llm":
            continue  # the rooms themselves
        if package in _modules() and _is_package(package) and not _is_in(one.module, package):
            return package
    return None


def test_every_import_of_ours_exists() -> None:
    for one in _ours():
        assert one.target in _modules(), f"{one.module}:{one.line} imports {one.target}, which is not there"


def test_every_room_has_a_floor() -> None:
    rooms = {_room(module) for module in _modules()} - {"fused_kv_llm"}
    assert rooms == set(FLOOR)


def test_the_design_has_every_room_on_its_floor() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.MULTILINE)
    told = {(room, int(number)) for number, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}
    frameworks = {"fused_kv_vllm", "langchain_fused_kv", "llama_index_fused_kv"}
    assert told == {(room, number) for room, number in FLOOR.items() if number and room not in frameworks}


def test_imports_go_down() -> None:
    for one in _ours():
        room, other = _room(one.module), _room(one.target)
        if room in (other, "fused_kv_llm"):
            continue
        # Reading the version needs nothing else of the package.
        if other == "fused_kv_llm" and one.name == "__version__":
            continue
        assert other in FLOOR, f"{one.module}:{one.line} imports from the package itself: name the room"
        assert FLOOR[other] < FLOOR[room], f"{one.module}:{one.line} imports {one.target}, which is not below it"


def test_rooms_of_the_store_import_down() -> None:
    floor = {room: number for number, rooms in enumerate(STORE_FLOORS) for room in rooms}
    for one in _ours():
        parts, others = one.module.split("."), one.target.split(".")
        if parts[:2] != ["fused_kv_llm", "store"] or others[:2] != parts[:2] or len(parts) < 3 or len(others) < 3:
            continue
        if parts[2] != others[2] and parts[2] in floor and others[2] in floor:
            assert floor[others[2]] < floor[parts[2]], f"{one.module}:{one.line} imports {one.target}"


def test_rooms_are_imported_through_their_face() -> None:
    past = [f"{one.module}:{one.line} imports {one.target}" for one in _ours() if _face_passed(one)]
    assert past == []


def test_no_private_name_leaves_its_module() -> None:
    for one in _ours():
        hidden = one.name.startswith("_") and not one.name.startswith("__")
        assert not hidden, f"{one.module}:{one.line} imports the private {one.name} of {one.target}"


def test_no_import_cycles() -> None:
    edges: dict[str, set[str]] = {module: set() for module in _modules()}
    for one in _ours():
        # A package's __init__ re-exports its own modules, and its modules import one another, not the face.
        if one.module != one.target and not one.for_types:
            edges[one.module].add(one.target)
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != 1, f"import cycle: {' -> '.join((*trail, module))}"
        if state.get(module) == 2:
            return
        state[module] = 1
        for other in sorted(edges[module]):
            visit(other, (*trail, module))
        state[module] = 2

    for module in sorted(edges):
        visit(module, ())


def test_no_cycles_between_rooms() -> None:
    """Rooms inside a room form no circle either; a module beside them counts as a room of its own."""
    for parent in sorted({module.rpartition(".")[0] for module in _modules()} - {""}):
        depth = parent.count(".") + 2
        edges: dict[str, set[str]] = {}
        for one in _ours():
            if one.for_types or not (_is_in(one.module, parent) and _is_in(one.target, parent)):
                continue
            child, other = (".".join(name.split(".")[:depth]) for name in (one.module, one.target))
            if child != other and parent not in (child, other):
                edges.setdefault(child, set()).add(other)
        for start, others in edges.items():
            reached, todo = set(), list(others)
            while todo:
                child = todo.pop()
                assert child != start, f"circle through {start} in {parent}"
                if child not in reached:
                    reached.add(child)
                    todo += edges.get(child, ())


def test_public_surface_is_pinned() -> None:
    assert sorted(fused_kv_llm.__all__) == sorted(SURFACE)


def test_every_module_lists_what_it_exports() -> None:
    for info in pkgutil.walk_packages(fused_kv_llm.__path__, "fused_kv_llm."):
        if info.name in NEED_RAY and importlib.util.find_spec("ray") is None:
            continue
        with warnings.catch_warnings():
            if info.name in NEED_RAY:
                warnings.simplefilter("ignore")  # Ray's own, when it is imported
            module = importlib.import_module(info.name)
        assert hasattr(module, "__all__"), f"{info.name} has no __all__"
        for name in module.__all__:
            assert hasattr(module, name), f"{info.name}.__all__ names {name}, which is not there"


@pytest.mark.parametrize("module", sorted(_modules()))
def test_no_print_and_no_assert_in_the_library(module: str) -> None:
    for node in ast.walk(ast.parse(_modules()[module].read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Assert), f"assert in {module}:{node.lineno}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            pytest.fail(f"print in {module}:{node.lineno}")
