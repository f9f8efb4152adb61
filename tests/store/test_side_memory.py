"""What is kept of sidecars: the newest state of the file, inside the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_kv_llm.store.read.side_memory import SideMemory


class Loads:
    """Counts how often a file is loaded; its tensors are as large as it is."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0

    def __call__(self) -> dict[str, torch.Tensor]:
        self.count += 1
        return {"x": torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.uint8)}


def test_a_file_is_loaded_once_until_it_changes(tmp_path: Path) -> None:
    path, memory = tmp_path / "a", SideMemory(100)
    path.write_bytes(b"12345678")
    load = Loads(path)
    first = memory.read(path, load)
    assert memory.read(path, load) is first
    assert (load.count, memory.nbytes) == (1, 8)
    other = tmp_path / "b"
    other.write_bytes(b"87654321")
    other.replace(path)
    assert bytes(memory.read(path, load)["x"].tolist()) == b"87654321"
    assert (load.count, memory.nbytes) == (2, 8)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        memory.read(path, load)


def test_the_budget_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    memory, loads = SideMemory(20), {}
    for name in "abcd":
        (tmp_path / name).write_bytes(b"0" * (8 if name != "d" else 21))
        loads[name] = Loads(tmp_path / name)
    for name in "abacad":
        memory.read(tmp_path / name, loads[name])
        assert memory.nbytes <= 20
    memory.read(tmp_path / "b", loads["b"])
    assert {name: load.count for name, load in loads.items()} == {"a": 1, "b": 2, "c": 1, "d": 1}
    memory.forget_all()
    assert memory.nbytes == 0


def test_what_cannot_be_loaded_is_not_kept(tmp_path: Path) -> None:
    path, memory = tmp_path / "a", SideMemory(100)
    path.write_bytes(b"1")

    def fail() -> dict[str, torch.Tensor]:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        memory.read(path, fail)
    assert memory.nbytes == 0


def test_a_file_is_worth_keeping_when_it_is_asked_for_again(tmp_path: Path) -> None:
    memory = SideMemory(100)
    path = tmp_path / "a"
    path.write_bytes(b"1234")
    assert [memory.is_wanted(path) for _ in range(3)] == [False, True, True]
    memory.forget_all()
    assert not memory.is_wanted(path)
    memory.read(path, Loads(path))
    assert memory.is_wanted(path)
    assert [SideMemory(0).is_wanted(path) for _ in range(2)] == [False, False]
    nothing = SideMemory(0)
    assert [nothing.is_wanted(path) for _ in range(3)] == [False, False, False]
