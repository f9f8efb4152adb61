"""Files of several encryption keys in one store: what a key does not open may be as good as any, and stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_chunks import build_chunk
from typer.testing import CliRunner

from fused_kv_llm.cli import app
from fused_kv_llm.errors import ConfigError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore, rebuild_index

pytest.importorskip("cryptography")

KEY, OTHER = "0123456789abcdef" * 4, "ab" * 32
CHUNKS = [build_chunk(seed) for seed in range(4)]
NAME = "anchors-0.1"


def fill(kv_dir: Path, key: str | None, chunks) -> None:
    with KVStore(kv_dir, encryption_key=key) as store:
        for chunk in chunks:
            chunk.put(store)
            store.sidecars.put(chunk.key, NAME, {"x": torch.arange(3)})


def snapshot(kv_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in kv_dir.rglob("*.safetensors")}


@pytest.fixture(name="keys", params=[(KEY, OTHER), (KEY, None), (None, KEY)], ids=["two keys", "plain", "sealed"])
def _keys(request: pytest.FixtureRequest) -> tuple[str | None, str | None]:
    return request.param


@pytest.fixture(name="mixed")
def _mixed(kv_dir: Path, keys: tuple[str | None, str | None]) -> Path:
    """Return a store whose index was lost, and in which one chunk was put with a new key afterwards."""
    mine, other = keys
    fill(kv_dir, mine, CHUNKS[:1])
    rebuild_index(kv_dir)
    new = kv_dir.with_name("new")
    fill(new, other, CHUNKS[1:])
    for path in new.rglob("*.safetensors"):
        target = kv_dir / path.relative_to(new)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return kv_dir


def test_mending_leaves_files_of_another_key(mixed: Path, keys: tuple[str | None, str | None]) -> None:
    before = snapshot(mixed)
    for key, own in ((keys[0], CHUNKS[:1]), (keys[1], CHUNKS[1:])):
        with KVStore(mixed, encryption_key=key) as store:
            report = store.check(fix=True)
            others = 2 * (len(CHUNKS) - len(own))
            assert report.by_kind == {"orphaned": len(own), "wrong row": len(own), "other key": others}
            assert report.left == others
            assert {finding.kind for finding in report.findings if finding.left} == {"other key"}
            assert store.check(fix=True).by_kind == {"other key": others}
            assert all(chunk.open(store) is not None for chunk in own)
        assert snapshot(mixed) == before
        rebuild_index(mixed)


def test_they_are_taken_away_when_the_user_says_so(mixed: Path, keys: tuple[str | None, str | None]) -> None:
    with KVStore(mixed, encryption_key=keys[0]) as store:
        store.check(fix=True, take_other_keys=True)
        assert store.check().findings == []
        assert CHUNKS[0].open(store) is not None
        kept = [path for path in (mixed / "quarantine").iterdir() if path.suffix == ".safetensors"]
        assert len(kept) == 6


def test_a_key_that_opens_nothing_takes_nothing(kv_dir: Path) -> None:
    fill(kv_dir, KEY, CHUNKS)
    rebuild_index(kv_dir)
    before = snapshot(kv_dir)
    # An empty index of the wrong key, as a store has that was begun anew in a folder whose files came back later.
    KVStore(kv_dir.with_name("new"), encryption_key=OTHER).close()
    (kv_dir.with_name("new") / "index.sqlite").rename(kv_dir / "index.sqlite")
    with KVStore(kv_dir, encryption_key=OTHER) as store, pytest.raises(StoreUnavailableError, match="another key"):
        store.check(fix=True, take_other_keys=True)
    assert snapshot(kv_dir) == before


def test_damage_is_told_from_another_key(mixed: Path, keys: tuple[str | None, str | None]) -> None:
    """The header's checksum needs no key: what is damaged goes to quarantine, whichever key it was written with."""
    path = CHUNKS[2].path(mixed)
    raw = bytearray(path.read_bytes())
    raw[300] ^= 1
    path.write_bytes(raw)
    with KVStore(mixed, encryption_key=keys[0]) as store:
        report = store.check(fix=True)
        assert (report.by_kind["damaged"], report.by_kind["other key"]) == (1, 5)
    assert not path.exists()


def test_a_chunk_of_another_key_can_be_stored(mixed: Path, keys: tuple[str | None, str | None]) -> None:
    with KVStore(mixed, encryption_key=keys[0]) as store:
        store.check(fix=True)
        assert CHUNKS[3].open(store) is None
        assert CHUNKS[3].put(store) > 0
        with CHUNKS[3].open(store) as stored:
            assert stored.read_layers(0, 3)[0].equal(CHUNKS[3].kv.keys)
        assert store.check(fix=True).by_kind == {"other key": 5}


def test_a_row_whose_file_is_of_another_key_is_dropped(mixed: Path, keys: tuple[str | None, str | None]) -> None:
    """Otherwise reading the chunk would move the file away."""
    theirs = CHUNKS[1].path(mixed).read_bytes()
    with KVStore(mixed, encryption_key=keys[0]) as store:
        CHUNKS[1].put(store)
        store.drop_memory()
        CHUNKS[1].path(mixed).write_bytes(theirs)
        store.check(fix=True)
        assert store.contains([CHUNKS[1].key]) == set()
        assert CHUNKS[1].open(store) is None
    assert CHUNKS[1].path(mixed).read_bytes() == theirs


def test_the_remote_tiers_objects_of_another_key_stay(kv_dir: Path, tmp_path: Path) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    with KVStore(kv_dir, encryption_key=KEY, remote=remote) as store:
        CHUNKS[0].put(store)
        store.evict(0)
        (path,) = (path for path in (tmp_path / "remote").iterdir())
        fill(tmp_path / "other", OTHER, CHUNKS[:1])
        theirs = CHUNKS[0].path(tmp_path / "other").read_bytes()
        path.write_bytes(theirs)
        with pytest.warns(FusedKVWarning, match="another key"):
            assert CHUNKS[0].open(store) is None
    assert path.read_bytes() == theirs


def test_the_command_line(mixed: Path, keys: tuple[str | None, str | None]) -> None:
    run = CliRunner(env={"COLUMNS": "200", "FUSED_KV_ENCRYPTION_KEY": keys[0] or ""}).invoke
    check = ["store", "check", "--kv-dir", str(mixed)]
    before = snapshot(mixed)
    mended = run(app, [*check, "--fix"])
    assert mended.exit_code == 1
    assert "2 findings mended, 6 left as they are" in mended.output
    assert "leave it for its key" in mended.output
    assert snapshot(mixed) == before
    assert "--fix" in run(app, [*check, "--take-other-keys"]).output
    taken = run(app, [*check, "--fix", "--take-other-keys"])
    assert (taken.exit_code, "6 findings mended" in taken.output) == (0, True)
    assert run(app, check).exit_code == 0


def test_the_option_needs_fix(kv_dir: Path) -> None:
    fill(kv_dir, None, CHUNKS[:1])
    with KVStore(kv_dir) as store, pytest.raises(ConfigError, match="fix=True"):
        store.check(take_other_keys=True)
