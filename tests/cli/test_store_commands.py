"""``fused-kv store`` on stores of small random chunks."""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from random_chunks import build_chunk
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner, Result

from fused_kv_llm.cli import app
from fused_kv_llm.cli import store as cli_store
from fused_kv_llm.store import KVStore, StoreCounters

CHUNKS = [build_chunk(seed, model="model-b" if seed == 5 else "model-a") for seed in range(6)]


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    with KVStore(tmp_path / "kv") as store:
        for chunk in CHUNKS:
            chunk.put(store)
        store.sidecars.put(CHUNKS[0].key, "anchors-0.1", {"positions": torch.arange(3)})
        store.describe(CHUNKS[0].identity, "model-a, float32, none")
        for _ in range(3):
            CHUNKS[2].open(store).read_layers(0, 3)
        store.open(build_chunk(99).key, [1])
    return tmp_path / "kv"


def put_out(kv_dir: Path) -> set[str]:
    return {path.name for path in (kv_dir / "chunks").rglob("*.safetensors")}


def assert_whole(kv_dir: Path, chunks=CHUNKS) -> None:
    with KVStore(kv_dir) as store:
        assert store.check().findings == []
        assert store.stats().chunks == len(chunks)
        for chunk in chunks:
            keys, values = chunk.open(store).read_layers(0, 3)
            assert keys.equal(chunk.kv.keys)
            assert values.equal(chunk.kv.values)


def test_stats(kv_dir):
    output = run("stats", "--kv-dir", kv_dir).output
    for text in ("model-a, float32, none", CHUNKS[5].identity[:12], "75.0% of 4 chunks", "30", "Chunk 2 says"):
        assert text in output
    # The hottest chunk stands first: put once, opened three times.
    first = output[output.index("Hottest") :].index(CHUNKS[2].key[:12])
    assert all(first < output[output.index("Hottest") :].index(c.key[:12]) for c in CHUNKS if c is not CHUNKS[2])


def test_stats_as_json_and_from_python(kv_dir):
    found = json.loads(run("stats", "--kv-dir", kv_dir, "--json").output)
    assert [(i["name"], i["chunks"], i["tokens"]) for i in found["identities"]] == [
        ("model-a, float32, none", 5, 25),
        ("", 1, 5),
    ]
    assert sum(i["disk_bytes"] for i in found["identities"]) == found["tiers"]["disk"][1]
    assert found["lifetime"]["hits"] == {"memory": 2, "disk": 1, "remote": 0}
    assert (found["lifetime"]["misses"], found["lifetime"]["puts"]) == (1, 6)
    assert found["hottest"][0] == [CHUNKS[2].key, 4]
    with KVStore(kv_dir) as store:
        assert store.counters() == StoreCounters()
        opened = CHUNKS[1].open(store)
        assert opened is not None
        opened.close()
        assert store.counters().hits["disk"] == 1
        # What several processes counted adds up.
        assert store.stats().lifetime.hits == {"memory": 2, "disk": 2, "remote": 0}
        assert store.stats().lifetime.hits == {"memory": 2, "disk": 2, "remote": 0}


@pytest.mark.parametrize("columns", [80, 200])
def test_numbers_are_never_cut(tmp_path, monkeypatch, columns):
    """Long texts take what the numbers leave, whatever they are made of."""
    chunks = [
        dataclasses.replace(CHUNKS[0], text="A passage that goes on and on. " * 80),
        dataclasses.replace(CHUNKS[1], text="夜间渡轮" * 300),
        dataclasses.replace(CHUNKS[2], text="\x1b]0;owned\x07 [bold]not bold[/] " + "x" * 500),
    ]
    with KVStore(tmp_path / "kv") as store:
        for chunk in chunks:
            chunk.put(store)
        store.describe(chunks[0].identity, "a/model-with-a-long-name, float32, similar preprocessing, stored in int8")
        for _ in range(1233):
            store._parts.uses.hit(chunks[0].key, "disk")
    monkeypatch.setattr(cli_store, "out", Console(width=columns))
    result = CliRunner().invoke(app, ["store", "stats", "--kv-dir", str(tmp_path / "kv")])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(cell_len, lines)) <= columns
    hottest = lines[next(n for n, line in enumerate(lines) if "Hottest" in line) :]
    for chunk, uses in zip(chunks, ("1,234", "1", "1"), strict=True):
        (line,) = (line for line in hottest if chunk.key[:12] in line)
        assert f" {uses} " in line
        assert "…" in line
    assert any("A passage that goes on" in line for line in hottest)
    assert any("[bold]not bold[/]" in line for line in hottest)
    assert "\x1b" not in result.output
    (model,) = (line for line in lines if chunks[0].identity[:12] in line)
    assert [part.strip() for part in model.split("│")[2:4]] == ["3", "15"]


def test_side_files_are_counted(kv_dir):
    (side,) = (kv_dir / "chunks").rglob("*.anchors-0.1.safetensors")
    nbytes, files = side.stat().st_size, list((kv_dir / "chunks").rglob("*.safetensors"))
    found = json.loads(run("stats", "--kv-dir", kv_dir, "--json").output)
    assert found["sidecars"] == {"disk": [1, nbytes], "remote": [0, 0]}
    assert found["tiers"]["disk"] == [6, sum(file.stat().st_size for file in files)]
    assert nbytes < 1000
    assert f"({nbytes} bytes of it in 1 sidecars)" in run("stats", "--kv-dir", kv_dir).output
    with KVStore(kv_dir) as store:
        # All of it counts towards the budget.
        assert store._parts.index.ledger.total("disk_nbytes") == found["tiers"]["disk"][1]
        store.sidecars.put(CHUNKS[0].key, "anchors-0.1", {"positions": torch.arange(3000)})
        assert store.stats().sidecars["disk"] == (1, side.stat().st_size)
        store.delete([CHUNKS[0].key])
        assert store.stats().sidecars["disk"] == (0, 0)


def test_check_finds_and_mends(kv_dir):
    assert "6 chunks are sound" in run("check", "--kv-dir", kv_dir).output
    CHUNKS[0].path(kv_dir).write_bytes(b"garbage")
    CHUNKS[1].path(kv_dir).unlink()
    output = run("check", "--kv-dir", kv_dir, code=1).output
    assert "damaged" in output
    assert "missing" in output
    assert "--fix" in output
    # With its chunk the sidecar goes too.
    assert "3 findings mended" in run("check", "--fix", "--kv-dir", kv_dir).output
    run("check", "--kv-dir", kv_dir)
    assert_whole(kv_dir, CHUNKS[2:])


@pytest.mark.parametrize("index", ["garbage", "gone"])
def test_check_makes_an_index_of_the_files(kv_dir, index):
    path = kv_dir / "index.sqlite"
    path.write_bytes(b"this is no database" * 300) if index == "garbage" else path.unlink()
    assert "--fix" in run("check", "--kv-dir", kv_dir, code=1).output or index == "gone"
    assert "6 chunks are sound" in run("check", "--fix", "--kv-dir", kv_dir).output
    assert_whole(kv_dir)
    with KVStore(kv_dir) as store:
        assert store.sidecars.read(CHUNKS[0].key, "anchors-0.1") is not None


@pytest.mark.parametrize("index", ["garbage", "gone"])
def test_check_without_the_key_changes_nothing(tmp_path, monkeypatch, index):
    pytest.importorskip("cryptography")
    kv_dir, key = tmp_path / "kv", "ab" * 32
    with KVStore(kv_dir, encryption_key=key) as store:
        for chunk in CHUNKS:
            chunk.put(store)
    path = kv_dir / "index.sqlite"
    path.write_bytes(b"this is no database" * 300) if index == "garbage" else path.unlink()
    before = {path: path.read_bytes() for path in kv_dir.rglob("*") if path.is_file()}
    for wrong in ("", "cd" * 32):
        monkeypatch.setenv("FUSED_KV_ENCRYPTION_KEY", wrong)
        output = run("check", "--fix", "--kv-dir", kv_dir, code=1).output
        assert "Nothing was changed" in output
        assert {path: path.read_bytes() for path in kv_dir.rglob("*") if path.is_file()} == before
    monkeypatch.setenv("FUSED_KV_ENCRYPTION_KEY", key)
    assert "6 chunks are sound" in run("check", "--fix", "--kv-dir", kv_dir).output
    assert_whole(kv_dir)


def test_evict(kv_dir):
    size = CHUNKS[2].path(kv_dir).stat().st_size
    assert "5 chunks evicted; 1 stay" in run("evict", "--to", f"{size + 10}B", "--kv-dir", kv_dir).output
    # The most used one stays.
    assert_whole(kv_dir, [CHUNKS[2]])
    assert "not a size" in run("evict", "--to", "much", "--kv-dir", kv_dir, code=1).output


def test_evict_to_a_remote_tier_and_back(kv_dir, tmp_path):
    remote = f"file://{tmp_path}/remote"
    assert "6 chunks evicted" in run("evict", "--to", "0", "--remote", remote, "--kv-dir", kv_dir).output
    found = json.loads(run("stats", "--kv-dir", kv_dir, "--json").output)
    assert [count for count, _ in found["tiers"].values()] == [0, 6]
    with KVStore(kv_dir, remote=remote) as store:
        stored = CHUNKS[0].open(store)
        assert stored.tier == "remote"
        assert stored.read_layers(0, 3)[0].equal(CHUNKS[0].kv.keys)


def test_export_and_import(kv_dir, tmp_path):
    archive, copy = tmp_path / "kv.tar", tmp_path / "copy"
    assert "6 chunks" in run("export", archive, "--kv-dir", kv_dir).output
    assert archive.stat().st_mode & 0o777 == 0o600
    assert "6 chunks and 1 sidecars imported" in run("import", archive, "--kv-dir", copy).output
    assert put_out(copy) == put_out(kv_dir)
    assert_whole(copy)
    with KVStore(copy) as store:
        assert torch.equal(store.sidecars.read(CHUNKS[0].key, "anchors-0.1")["positions"], torch.arange(3))
    assert (
        "0 chunks and 0 sidecars imported (0 bytes), 7 were stored" in run("import", archive, "--kv-dir", copy).output
    )


def test_export_of_one_identity(kv_dir, tmp_path):
    archive = tmp_path / "kv.tar"
    assert "1 chunks" in run("export", archive, "--identity", CHUNKS[5].identity[:8], "--kv-dir", kv_dir).output
    run("import", archive, "--kv-dir", tmp_path / "copy")
    assert_whole(tmp_path / "copy", CHUNKS[5:])
    assert "identities" in run("export", archive, "--identity", "xyz", "--kv-dir", kv_dir, code=1).output


def test_import_takes_nothing_on_trust(kv_dir, tmp_path):
    archive = tmp_path / "kv.tar"
    good = {chunk: chunk.path(kv_dir).read_bytes() for chunk in CHUNKS[:3]}
    name = "{}.safetensors".format
    flipped = bytearray(good[CHUNKS[1]])
    flipped[-7] ^= 1
    members = {
        f"../../{name(CHUNKS[0].key)}": good[CHUNKS[0]],
        f"/tmp/{name(CHUNKS[0].key)}": good[CHUNKS[0]],
        f"{CHUNKS[0].key}.../../x.safetensors": good[CHUNKS[0]],
        "index.sqlite": b"SQLite format 3\0",
        name(CHUNKS[1].key): bytes(flipped),
        name(CHUNKS[4].key): good[CHUNKS[2]],
        f"{CHUNKS[3].key}.anchors.safetensors": good[CHUNKS[2]],
        name(CHUNKS[2].key): good[CHUNKS[2]],
    }
    with tarfile.open(archive, "w") as tar:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo(name(CHUNKS[5].key))
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = {str(path) for path in tmp_path.rglob("*")}
    output = run("import", archive, "--kv-dir", tmp_path / "copy").output
    assert "1 chunks and 0 sidecars imported" in output
    assert output.count("was refused") == 8
    assert_whole(tmp_path / "copy", [CHUNKS[2]])
    made = {str(path) for path in tmp_path.rglob("*")} - before
    assert all(path.startswith(str(tmp_path / "copy")) for path in made)
    assert not Path(f"/tmp/{name(CHUNKS[0].key)}").exists()


def test_archives_that_cannot_be_used(kv_dir, tmp_path):
    archive = tmp_path / "kv.tar"
    assert "cannot be read" in run("import", archive, "--kv-dir", kv_dir, code=1).output
    archive.write_bytes(b"no archive" * 1000)
    assert "cannot be read" in run("import", archive, "--kv-dir", kv_dir, code=1).output
    assert "cannot be written" in run("export", tmp_path / "none" / "kv.tar", "--kv-dir", kv_dir, code=1).output
    run("export", archive, "--kv-dir", kv_dir)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    CliRunner().invoke(app, ["store", "import", str(archive), "--kv-dir", str(tmp_path / "part")])
    with KVStore(tmp_path / "part") as store:
        # What came before the cut is kept, and nothing of what it cut.
        assert 1 <= store.stats().chunks < 6
        assert store.check().findings == []


def test_garbage(kv_dir):
    CHUNKS[0].path(kv_dir).write_bytes(b"garbage")
    run("check", "--fix", "--kv-dir", kv_dir)
    assert "1 files deleted, 7 bytes freed" in run("gc", "--kv-dir", kv_dir).output
    assert list((kv_dir / "quarantine").iterdir()) == []


@pytest.mark.parametrize(
    "command", [["stats"], ["check"], ["check", "--fix"], ["evict", "--to", "1GB"], ["export", "x.tar"], ["gc"]]
)
def test_a_store_that_is_not_there(tmp_path, command):
    result = run(*command, "--kv-dir", tmp_path / "kv", code=1)
    assert "There is no KV store" in result.output
    assert not (tmp_path / "kv").exists()


def test_pins(kv_dir):
    keys = [chunk.key for chunk in CHUNKS[:2]]
    assert "2 chunks are pinned for the [law]" in run("pin", *keys, "--for", "the [law]", "--kv-dir", kv_dir).output
    run("pin", keys[0], "--for", "me", "--kv-dir", kv_dir)
    run("evict", "--to", "0", "--kv-dir", kv_dir, code=1)
    with KVStore(kv_dir, read_only=True) as store:
        assert store.pins.of([chunk.key for chunk in CHUNKS]) == set(keys)
        assert all(store.rows([key]) for key in keys)
        nbytes = store.stats().tiers["disk"][1]
    found = json.loads(run("pins", "--kv-dir", kv_dir, "--json").output)
    assert (found["holders"], found["pinned_bytes"] > 0) == (["me", "the [law]"], True)
    assert found["pinned_bytes"] <= nbytes
    assert "the [law]" in run("pins", "--kv-dir", kv_dir).output

    run("unpin", "--for", "the [law]", "--kv-dir", kv_dir)
    with KVStore(kv_dir, read_only=True) as store:
        assert store.pins.of(keys) == {keys[0]}
    assert "fused-kv store pins" in run("unpin", "--for", "nobody", "--kv-dir", kv_dir, code=1).output
    run("unpin", "--for", "me", "--kv-dir", kv_dir)
    run("evict", "--to", "0", "--kv-dir", kv_dir)


def test_pins_take_keys_only(kv_dir):
    assert "64 hexadecimal digits" in run("pin", "xyz", "--for", "me", "--kv-dir", kv_dir, code=1).output


def test_a_remote_tier_is_published_to_refreshed_from_and_checked(kv_dir, tmp_path):
    url = f"file://{tmp_path}/shared"
    shared = tmp_path / "shared"
    assert "6 chunks are there" in run("publish", "--kv-dir", kv_dir, "--remote", url).output
    assert len(list(shared.iterdir())) == 7
    assert put_out(kv_dir) == {path.name for path in shared.iterdir()}, "they stay here"
    assert "0 bytes copied" in run("publish", "--kv-dir", kv_dir, "--remote", url).output
    KVStore(tmp_path / "two").close()
    assert (
        "6 chunks and 0 sidecars are new, 0 chunks"
        in run("refresh", "--kv-dir", tmp_path / "two", "--remote", url).output
    )
    assert "6 on the remote tier" in run("check", "--kv-dir", kv_dir, "--remote", url).output
    damaged = shared / f"{CHUNKS[1].key}.safetensors"
    raw = bytearray(damaged.read_bytes())
    raw[-3] ^= 1
    damaged.write_bytes(raw)
    assert "damaged" in run("check", "--kv-dir", kv_dir, "--remote", url, code=1).output
    run("check", "--kv-dir", kv_dir, "--remote", url, "--fix")
    assert not damaged.exists()
    run("publish", "--kv-dir", kv_dir, "--remote", url)
    run("check", "--kv-dir", kv_dir, "--remote", url)
    (shared / f"{CHUNKS[4].key}.safetensors").unlink()
    assert "1 chunks are gone" in run("refresh", "--kv-dir", tmp_path / "two", "--remote", url).output
    assert "no remote tier" in run("publish", "--kv-dir", kv_dir, code=1).output
