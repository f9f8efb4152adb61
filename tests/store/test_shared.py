"""A remote tier that several machines write to and read from; every store of its own folder is a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_chunks import Chunk
from services import Remote
from waiting import wait_until

from fused_kv_llm.errors import ConfigError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.prompt import content_hash
from fused_kv_llm.store import KVStore, RefreshReport, StoredElsewhere, refreshing

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")
SHIFT = "shift-9"


@pytest.fixture
def chunks(make_chunk) -> list[Chunk]:
    return [make_chunk(seed) for seed in range(4)]


def objects(remote: Remote) -> dict[str, bytes]:
    tier = remote.open()
    return tier.get(list(tier.sizes()))


def put_shift(store: KVStore, chunk: Chunk, start: int = 0) -> None:
    store.sidecars.put(chunk.key, SHIFT, {"shift": torch.arange(start, start + 5)})


def test_what_one_machine_publishes_others_learn_with_its_sidecars(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two") as two:
        for chunk in chunks:
            chunk.put(one)
        put_shift(one, chunks[0])
        assert two.shared.refresh() == RefreshReport()
        copied = one.shared.publish()
        assert copied == sum(len(data) for data in objects(remote).values()) > 0
        # They stay on the disk, and are not copied twice.
        assert one.stats().tiers["disk"][0] == one.stats().tiers["remote"][0] == 4
        assert one.shared.publish() == 0
        assert two.shared.refresh() == RefreshReport(chunks=4)
        assert two.stats().tiers["disk"] == (0, 0)
        assert two.rows([chunks[2].key])[chunks[2].key].text == chunks[2].text
        assert torch.equal(two.sidecars.read(chunks[0].key, SHIFT)["shift"], torch.arange(5))
        assert chunks[1].open(two).tier == "remote"
        assert chunks[1].open(two).tier == "disk", "the disk is a cache of what was read"
        assert two.check().findings == two.shared.check().findings == []


def test_a_machine_that_opens_the_store_later_has_the_sidecars_too(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one:
        chunks[0].put(one)
        put_shift(one, chunks[0])
        one.shared.publish()
    with remote.store(tmp_path / "two") as two:
        assert two.sidecars.lacking(chunks[0].identity, SHIFT) == []
        assert torch.equal(two.sidecars.read(chunks[0].key, SHIFT)["shift"], torch.arange(5))


def test_two_that_compute_the_same_chunk_write_one_object(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two") as two:
        for store in (one, two):
            chunks[0].put(store)
        assert one.shared.publish() > 0
        assert two.shared.publish() == 0
        assert set(objects(remote)) == {f"{chunks[0].key}.safetensors"}
        # Both know that it is there, so evicting it copies nothing.
        assert two.evict(0) == 1
        assert two.counters().demoted == 1
        assert chunks[0].open(two).tier == "remote"


def test_a_cached_chunk_that_got_another_sidecar_is_fetched_again(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two") as two:
        chunks[0].put(one)
        one.shared.publish()
        two.shared.refresh()
        chunks[0].open(two).close()
        put_shift(one, chunks[0])
        assert one.shared.publish() < len(objects(remote)[f"{chunks[0].key}.safetensors"]), "only the sidecar is copied"
        assert two.sidecars.read(chunks[0].key, SHIFT) is None
        assert two.shared.refresh() == RefreshReport(sidecars=1)
        assert torch.equal(two.sidecars.read(chunks[0].key, SHIFT)["shift"], torch.arange(5))
        assert two.check().findings == []
        assert two.shared.refresh() == RefreshReport()


def test_deleted_chunks_leave_every_machine(remote, tmp_path, chunks, make_chunk):
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two") as two:
        for chunk in chunks:
            chunk.put(one)
        one.shared.publish()
        two.shared.refresh()
        for chunk in chunks[:2]:
            chunk.open(two).close()
        own = make_chunk(77)
        own.put(two)
        assert one.delete([chunks[0].key, chunks[2].key]) == 2
        assert two.shared.refresh() == RefreshReport(gone=2)
        assert two.contains(c.key for c in chunks) == {chunks[1].key, chunks[3].key}
        assert chunks[0].open(two) is None
        assert not list((tmp_path / "two").rglob(f"{chunks[0].key}*"))
        assert two.contains([own.key]) == {own.key}, "what was never shared stays"
        assert two.departures([chunks[0].key]) == {chunks[0].key: "deleted"}
        assert two.check().findings == []


def test_a_tier_that_was_emptied_costs_no_cache(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one:
        for chunk in chunks[:2]:
            chunk.put(one)
        one.shared.publish()
        one.evict(0)
        chunks[0].open(one).close()
        tier = remote.open()
        tier.delete(list(tier.sizes()))
        with pytest.warns(FusedKVWarning, match="Nothing is left of 2 chunks"):
            assert one.shared.refresh() == RefreshReport(gone=1)
        assert chunks[0].open(one).tier == "disk"
        assert one.shared.publish() > 0


def test_tenants_share_a_tier_and_find_nothing_of_each_other(remote, tmp_path, make_chunk):
    one, two = make_chunk(5, tenant="ada"), make_chunk(5, tenant="bob")
    assert one.text == two.text
    with remote.store(tmp_path / "one") as store:
        one.put(store)
        two.put(store)
        store.shared.publish()
    assert len(objects(remote)) == 2
    with remote.store(tmp_path / "three") as store:
        assert store.keys(one.identity) == [one.key]
        assert store.keys(two.identity) == [two.key]


def test_chunks_are_brought_that_the_index_does_not_know(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one:
        for chunk in chunks[:3]:
            chunk.put(one)
        one.shared.publish()
    damaged = bytearray(objects(remote)[f"{chunks[2].key}.safetensors"])
    damaged[-3] ^= 1
    remote.open().put(f"{chunks[2].key}.safetensors", [memoryview(bytes(damaged))])
    with remote.store(tmp_path / "two", learn=False) as two:
        assert two.stats().chunks == 0
        with pytest.warns(FusedKVWarning, match="cannot be used"):
            assert two.shared.bring([c.key for c in chunks]) == {chunks[0].key, chunks[1].key}
        assert chunks[0].open(two).tier == "disk"
        assert two.shared.publish() == 0


def test_what_others_have_stored_is_noted_without_asking_the_tier(remote, tmp_path, chunks, monkeypatch):
    with remote.store(tmp_path / "one") as one:
        chunks[0].put(one)
        put_shift(one, chunks[0])
        one.shared.publish()
        row = one.rows([chunks[0].key])[chunks[0].key]
    with remote.store(tmp_path / "two", learn=False) as two:
        sizes = {name: len(data) for name, data in objects(remote).items()}
        side = {SHIFT: sizes[f"{chunks[0].key}.{SHIFT}.safetensors"]}
        two.shared.note([StoredElsewhere(row, content_hash(row.text), side)] * 2)
        assert two.sidecars.lacking(row.identity, SHIFT) == []
        assert two.stats().tiers["remote"] == (1, sum(sizes.values()))
        assert two.stats().tiers["disk"] == (0, 0)
        assert two.shared.refresh() == RefreshReport()
        assert chunks[0].open(two).tier == "remote"


@pytest.mark.parametrize("cached", [True, False])
def test_the_check_reads_every_object_and_mends(remote, tmp_path, chunks, cached):
    with remote.store(tmp_path / "one") as one:
        for chunk in chunks:
            chunk.put(one)
        put_shift(one, chunks[1])
        one.shared.publish()
        if not cached:
            one.evict(0)
    before, tier = objects(remote), remote.open()
    names = [f"{chunk.key}.safetensors" for chunk in chunks]
    raw = bytearray(before[names[0]])
    raw[-9] ^= 8
    tier.put(names[0], [memoryview(bytes(raw))])
    tier.delete([names[1]])
    tier.put("notes.txt", [memoryview(b"hello")])
    with remote.store(tmp_path / "one", learn=False) as one:
        report = one.shared.check()
        assert report.by_kind == {"damaged": 1, "missing": 1, "orphaned": 1, "foreign": 1}
        assert (report.remote_chunks, report.left) == (2, 4)
        assert one.shared.check().by_kind == report.by_kind, "nothing was mended"
        assert one.shared.check(fix=True).left == 1
        assert one.shared.check().by_kind == {"foreign": 1}
        assert one.contains(c.key for c in chunks) == {c.key for c in (chunks if cached else chunks[2:])}
        one.shared.publish()
        after = objects(remote)
        assert after.pop("notes.txt") == b"hello"
        assert after == (before if cached else {name: before[name] for name in names[2:]})
    # A machine that knows nothing learns what is sound.
    with remote.store(tmp_path / "two", learn=False) as two:
        assert two.shared.check().by_kind["orphaned"] == (4 if cached else 2)
        two.shared.check(fix=True)
        assert two.stats().chunks == (4 if cached else 2)
        assert two.sidecars.has(chunks[1].key, SHIFT) == cached


def test_an_archive_of_rows_with_long_texts_is_learnt(remote, tmp_path, make_chunk):
    long = make_chunk(9, more_text=" word" * 9000)
    with remote.store(tmp_path / "one") as one:
        long.put(one)
        one.shared.publish()
    with remote.store(tmp_path / "two") as two:
        assert two.rows([long.key])[long.key].text == long.text


def test_without_a_remote_tier_it_says_so(kv_dir: Path):
    with KVStore(kv_dir) as store:
        for call in (store.shared.publish, store.shared.refresh, store.shared.check):
            with pytest.raises(StoreUnavailableError, match="no remote tier"):
                call()


def test_a_store_looks_again_by_itself(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two", refresh_s=0.05) as two:
        for chunk in chunks[:2]:
            chunk.put(one)
        one.shared.publish()
        wait_until(lambda: len(two.contains(c.key for c in chunks)) == 2)
        one.delete([chunks[0].key])
        wait_until(lambda: not two.contains([chunks[0].key]))
    with pytest.raises(ConfigError, match="refresh_s"):
        remote.store(tmp_path / "three", refresh_s=0)


def test_a_tier_that_is_away_is_told_once_and_found_again(tmp_path, chunks, monkeypatch):
    remote = Remote(f"file://{tmp_path}/shared")
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two", refresh_s=0.02, learn=False) as two:
        tier, told = two._parts.tier, []
        monkeypatch.setattr(refreshing, "warn", told.append)
        versions, asked = tier.versions, []

        def away():
            asked.append(1)
            raise StoreUnavailableError("away")

        monkeypatch.setattr(tier, "versions", away)
        wait_until(lambda: len(asked) >= 3)
        monkeypatch.setattr(tier, "versions", versions)
        chunks[0].put(one)
        one.shared.publish()
        wait_until(lambda: two.contains([chunks[0].key]))
        assert len(told) == 1
        assert "away" in told[0]


def damage(remote: Remote, name: str, at: int) -> bytes:
    tier = remote.open()
    raw = bytearray(tier.get([name])[name])
    raw[at] ^= 1
    tier.put(name, [memoryview(bytes(raw))])
    return bytes(raw)


def test_a_damaged_object_is_replaced_by_a_sound_copy(tmp_path, chunks):
    remote = Remote(f"file://{tmp_path}/shared")
    names = [f"{chunk.key}.safetensors" for chunk in chunks]
    with remote.store(tmp_path / "one") as one:
        for chunk in chunks[:2]:
            chunk.put(one)
        one.shared.publish()
    sound = objects(remote)
    damage(remote, names[0], 40)
    damage(remote, names[1], -3)
    with remote.store(tmp_path / "two", learn=False) as two:
        # The damage to its tensors is found when it is read, that to its header when it is compared.
        with pytest.warns(FusedKVWarning, match="cannot be used"):
            assert two.shared.bring([chunks[1].key]) == set()
        assert set(objects(remote)) == {names[0]}
        for chunk in chunks[:2]:
            chunk.put(two)
        with pytest.warns(FusedKVWarning, match="replaced by this machine's copy"):
            assert two.shared.publish() == sum(map(len, sound.values()))
        assert objects(remote) == sound
        # What somebody has deleted there is copied again, once it was asked for.
        remote.open().delete([names[0]])
        assert two.shared.present([c.key for c in chunks]) == {chunks[1].key}
        assert two.shared.publish() == len(sound[names[0]])


def test_objects_of_another_encryption_key_are_neither_trusted_nor_replaced(tmp_path, chunks):
    pytest.importorskip("cryptography")
    remote = Remote(f"file://{tmp_path}/shared")
    with remote.store(tmp_path / "one", encryption_key="ab" * 32) as one:
        chunks[0].put(one)
        one.shared.publish()
    before = objects(remote)
    with remote.store(tmp_path / "two", encryption_key="cd" * 32, learn=False) as two:
        for chunk in chunks[:2]:
            chunk.put(two)
        with pytest.raises(StoreUnavailableError, match="another encryption key"):
            two.shared.publish()
        assert two.stats().tiers["remote"][0] == 1, "the other one was copied"
    assert before.items() <= objects(remote).items()


def test_a_long_header_is_read_whole(tmp_path, make_chunk):
    remote = Remote(f"file://{tmp_path}/shared")
    long = make_chunk(9, more_text=" word" * 90_000)
    with remote.store(tmp_path / "one") as one:
        long.put(one)
        one.shared.publish()
    with remote.store(tmp_path / "two") as two:
        assert two.rows([long.key])[long.key].text == long.text


def test_a_sidecar_that_was_rewritten_with_as_many_bytes_is_fetched_again(remote, tmp_path, chunks):
    def read(store: KVStore) -> int:
        return int(store.sidecars.read(chunks[0].key, SHIFT)["shift"][0])

    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two") as two:
        chunks[0].put(one)
        put_shift(one, chunks[0])
        one.shared.publish()
        two.shared.refresh()
        assert read(two) == 0
        assert two.shared.refresh() == RefreshReport()
        put_shift(one, chunks[0], start=50)
        assert one.shared.refresh() == RefreshReport(), "its own is not taken for published"
        assert one.shared.publish() > 0
        assert two.shared.refresh() == RefreshReport(sidecars=1)
        assert read(two) == 50
        # Those that wrote it, or have just fetched it, keep it.
        assert one.shared.refresh() == two.shared.refresh() == RefreshReport()
        assert chunks[0].open(one).tier == chunks[0].open(two).tier == "disk"


def test_a_store_in_a_folder_of_another_store_is_not_mixed_up_with_it(tmp_path, chunks):
    outer, inner = (Remote(f"file://{tmp_path}/shared{below}") for below in ("", "/below"))
    with inner.store(tmp_path / "one") as one:
        chunks[0].put(one)
        one.shared.publish()
    with outer.store(tmp_path / "two") as two:
        assert two.stats().chunks == 0
        chunks[0].put(two)
        two.shared.refresh()
        assert two.shared.publish() > 0
    assert len(objects(outer)) == len(objects(inner)) == 1


def test_objects_that_are_none_do_not_take_the_tier_down(remote, tmp_path, chunks):
    tier = remote.open()
    odd = f"{'0' * 64}.safetensors"
    tier.put(odd, [memoryview(b"")])
    if remote.url.startswith("redis"):
        tier._client.set(b"fused-kv:\xff\xfe", b"no name")
        tier._client.lpush(f"fused-kv:{'1' * 64}.safetensors", "a list")
        assert tier.get([f"{'1' * 64}.safetensors"], 8) == {}
    with remote.store(tmp_path / "one") as one:
        chunks[0].put(one)
        assert one.shared.present([chunks[0].key, "0" * 64, "1" * 64]) == set()
        assert one.shared.publish() > 0
    with remote.store(tmp_path / "two") as two:
        assert two.contains(["0" * 64, chunks[0].key]) == {chunks[0].key}


def test_looking_again_goes_on_after_any_error(monkeypatch):
    told, asked = list[str](), list[int]()
    monkeypatch.setattr(refreshing, "warn", told.append)

    def fails() -> None:
        asked.append(1)
        raise KeyError("a bug")

    looking = refreshing.Refreshing(fails, 0.01)
    wait_until(lambda: len(asked) >= 3)
    looking.close()
    assert told == ["What other machines have changed in the shared store is not known: KeyError('a bug')"]


def test_another_tier_costs_no_cache_and_gets_what_it_lacks(tmp_path, chunks):
    old, new = (Remote(f"file://{tmp_path}/{name}") for name in ("old", "new"))
    with new.store(tmp_path / "other") as other:
        for chunk in chunks[2:]:
            chunk.put(other)
        other.shared.publish()
    with old.store(tmp_path / "one") as one:
        for chunk in chunks[:3]:
            chunk.put(one)
        one.shared.publish()
    with pytest.warns(FusedKVWarning, match="another remote tier than the last time"):
        one = new.store(tmp_path / "one")
    with one:
        assert one.contains(c.key for c in chunks) == {c.key for c in chunks}
        assert chunks[0].open(one).tier == "disk"
        one.shared.publish()
        assert set(objects(new)) == {f"{chunk.key}.safetensors" for chunk in chunks}
    new.store(tmp_path / "one").close()  # No warning: it is the same now.


def test_it_says_so_when_most_chunks_are_gone_at_once(tmp_path, make_chunk):
    remote = Remote(f"file://{tmp_path}/shared")
    many = [make_chunk(seed) for seed in range(20)]
    with remote.store(tmp_path / "one") as one:
        for chunk in many:
            chunk.put(one)
        one.shared.publish()
        remote.open().delete([f"{chunk.key}.safetensors" for chunk in many[:18]])
        with pytest.warns(FusedKVWarning, match="18 of 20 chunks .* noeviction"):
            assert one.shared.refresh() == RefreshReport(gone=18)


@pytest.mark.parametrize("when", ["before the chunk", "after the chunk"])
def test_a_check_does_not_take_sidecars_from_a_chunk_that_is_being_published(tmp_path, chunks, monkeypatch, when):
    remote = Remote(f"file://{tmp_path}/shared")
    with remote.store(tmp_path / "one") as one, remote.store(tmp_path / "two") as two:
        chunks[1].put(two)
        chunks[0].put(one)
        put_shift(one, chunks[0])
        put, sizes = one._parts.tier.put, two._parts.tier.sizes

        def checked(name, parts):
            if SHIFT in name or when == "after the chunk":
                put(name, parts)
            if SHIFT not in name and when == "before the chunk":
                two.shared.check(fix=True)
                put(name, parts)

        def listed():
            found = sizes()
            if when == "after the chunk":
                # The check has listed the sidecar alone.
                found.pop(f"{chunks[0].key}.safetensors", None)
            return found

        monkeypatch.setattr(one._parts.tier, "put", checked)
        monkeypatch.setattr(two._parts.tier, "sizes", listed)
        one.shared.publish()
        if when == "after the chunk":
            two.shared.check(fix=True)
        assert set(objects(remote)) == {f"{chunks[0].key}{side}.safetensors" for side in ("", f".{SHIFT}")}


def test_a_check_reads_nothing_that_is_not_ours(tmp_path, chunks, monkeypatch):
    remote = Remote(f"file://{tmp_path}/shared")
    remote.open().put("huge.bin", [memoryview(b"x" * 100)])
    with remote.store(tmp_path / "one") as one:
        tier, read = one._parts.tier, list[str]()
        get = tier.get
        monkeypatch.setattr(tier, "get", lambda names, *first: read.extend(names) or get(names, *first))
        assert one.shared.check().by_kind == {"foreign": 1}
        assert read == []
