"""The file of the request log: it is bounded, shared, and never in the way of an answer."""

from __future__ import annotations

import logging
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from fused_kv_llm.server import history_file
from fused_kv_llm.server.history import History
from fused_kv_llm.server.history_schema import HISTORY_SCHEMA, RequestRecord
from fused_kv_llm.server.refusals import RefusedError
from fused_kv_llm.server.retention import retain

DAY_S = 86400.0
WORD = "aldebaran" * 4


class _Clock:
    now_s = 100 * DAY_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def history(tmp_path: Path, clock: _Clock) -> Iterator[History]:
    with closing(History(tmp_path / "requests", 30 * DAY_S, 2**20, clock)) as made:
        yield made


def record(number: int, tenant: str = "", created_s: float = 100 * DAY_S, text: str = WORD) -> RequestRecord:
    detail = {"answer": text}
    return RequestRecord(f"{tenant}{number}", "", tenant, created_s, "/v1", question=text[:200], detail=detail)


def add(history: History, *records: RequestRecord) -> None:
    for one in records:
        history.add(lambda one=one: one, 100)


def ids(history: History, tenant: str = "") -> list[str]:
    return [row["id"] for row in history.summaries(tenant, 10_000)]


def written(history: History) -> bytes:
    return b"".join(path.read_bytes() for path in history.path.parent.iterdir())


def test_what_is_too_old_goes_and_leaves_no_text(history: History, clock: _Clock) -> None:
    add(history, record(0), record(1, created_s=clock.now_s + DAY_S, text="new"))
    assert WORD.encode() in (history.summaries("", 9) and written(history))
    clock.now_s += 30.5 * DAY_S
    assert history.sweep() == 1
    assert ids(history) == ["1"]
    assert WORD.encode() not in written(history)
    assert history.sweep() == 0


def test_what_is_deleted_leaves_no_text(history: History) -> None:
    add(history, record(0), record(1, text="new"))
    assert not history.remove("other", "0")
    assert history.remove("", "0")
    assert not history.remove("", "0")
    assert WORD.encode() not in written(history)


def noise(number: int, chars: int) -> str:
    """Return a text that does not compress well."""
    return "".join(map(chr, random.Random(number).choices(range(0x4E00, 0x4E00 + 20000), k=chars)))


def test_space_is_given_back(history: History, clock: _Clock) -> None:
    add(history, *(record(number, text=noise(number, 20_000)) for number in range(6)))
    assert len(ids(history)) == 6
    assert len(written(history)) > 200_000
    clock.now_s += 31 * DAY_S
    assert history.sweep() == 6
    assert len(written(history)) < 120_000


def test_the_file_stays_small(history: History) -> None:
    # More texts than fit between two sweeps.
    add(history, *(record(number, text=noise(number, 20_000)) for number in range(60)))
    kept = ids(history)
    assert 0 < len(kept) < 60
    assert kept[0] == "59"
    assert history.sweep() >= 0
    assert sum(path.stat().st_size for path in history.path.parent.iterdir()) < 1.3 * 2**20


def test_one_request_cannot_push_out_all_others(history: History) -> None:
    add(history, record(0), record(1, text=noise(1, 400_000)))
    assert ids(history) == ["1", "0"]
    assert history.detail("", "1") == history.summaries("", 1)[0] | {"question": None}


def test_every_text_of_a_row_counts(history: History) -> None:
    """What a client writes in the place of a name or an error takes room as its question does."""
    for name in ("model", "selector", "request_id", "error"):
        one = record(0)
        value = {"message": "x" * 5000} if name == "error" else "x" * 5000
        setattr(one, name, value)
        one.id = name
        add(history, one)
    plain = record(1)
    add(history, plain)
    assert set(ids(history)) == {"model", "selector", "request_id", "error", "1"}
    with closing(sqlite3.connect(history.path)) as connection:
        sizes = dict(connection.execute("SELECT id, nbytes FROM requests").fetchall())
    assert all(sizes[name] >= sizes["1"] + 4900 for name in ("model", "selector", "request_id", "error"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5000)), max_size=40), st.integers(0, 60_000))
@example([("a", 0), *[("b", 5000)] * 20], 20_000)
def test_tenants_have_equal_shares(rows: list[tuple[str, int]], most: int) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with closing(connection):
        for statement in HISTORY_SCHEMA:
            connection.execute(statement)
        names = "id, tenant, nbytes, request_id, created_s, endpoint, status, http_status, verdicts"
        for number, (tenant, nbytes) in enumerate(rows):
            values = (number, tenant, nbytes, "", 0.0, "", "ok", 200, "{}")
            connection.execute(f"INSERT INTO requests ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        retain(connection, -1.0, most)
        left = [(int(id_), nbytes + 600) for id_, nbytes in connection.execute("SELECT id, nbytes FROM requests")]
    kept = {number for number, _ in left}
    assert sum(size for _, size in left) <= most
    of_tenant = {name: [i for i, (tenant, _) in enumerate(rows) if tenant == name] for name in "abc"}
    sizes = {name: sum(rows[i][1] + 600 for i in numbers) for name, numbers in of_tenant.items()}
    for name, numbers in of_tenant.items():
        # The newest stay.
        assert [number in kept for number in numbers] == sorted(number in kept for number in numbers)
        if sizes[name] <= most // max(1, sum(size > 0 for size in sizes.values())):
            assert set(numbers) <= kept


def test_a_damaged_file_is_reported_once(history: History, caplog: pytest.LogCaptureFixture) -> None:
    history.path.parent.mkdir()
    history.path.write_bytes(b"this is no database" * 1000)
    caplog.set_level(logging.INFO, "fused_kv_llm.server.history_writer")
    add(history, *map(record, range(5)))
    with pytest.raises(RefusedError, match="cannot be used now"):
        history.summaries("", 9)
    assert history.sweep() == 0
    add(history, record(5))
    with pytest.raises(RefusedError, match="cannot be used now"):
        history.remove("", "5")
    assert [one.message.split(":")[0] for one in caplog.records if one.name.endswith("writer")] == [
        f"Requests cannot be kept in {history.path}"
    ]
    history.path.rename(history.path.with_suffix(".damaged"))
    history.sweep()
    add(history, record(6))
    assert ids(history) == ["6"]
    assert caplog.records[-1].message.endswith("again")


def test_a_request_that_cannot_be_kept_costs_no_other(history: History, caplog: pytest.LogCaptureFixture) -> None:
    add(history, record(1))

    def impossible() -> RequestRecord:
        raise ValueError("it is nested too deep")

    history.add(impossible, 10)
    add(history, record(2))
    assert ids(history) == ["2", "1"]
    assert "A request is not kept" in caplog.text
    assert "nested too deep" in caplog.text


def test_a_full_disk_is_reported_once(
    history: History, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = history_file._prepare

    def small(connection: sqlite3.Connection) -> None:
        prepare(connection)
        connection.execute("PRAGMA max_page_count = 12")

    with monkeypatch.context() as patched:
        patched.setattr(history_file, "_prepare", small)
        add(history, *(record(number, text=str(number) * 4000) for number in range(400)))
        kept = ids(history)
        assert 0 < len(kept) < 400
        assert [one.levelname for one in caplog.records] == ["ERROR"]
        assert "full" in caplog.text
    history.sweep()
    add(history, record(1000))
    assert ids(history) == ["1000", *kept]


def test_a_file_that_is_locked_holds_up_nobody(history: History, caplog: pytest.LogCaptureFixture) -> None:
    add(history, record(0))
    assert ids(history) == ["0"]
    with closing(sqlite3.connect(history.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        started_s = time.perf_counter()
        add(history, *map(record, range(1, 1500)))
        assert time.perf_counter() - started_s < 1.0
        other.execute("COMMIT")
    wait_until(lambda: len(ids(history)) > 900)
    assert len(ids(history)) < 1500
    assert [one.levelname for one in caplog.records] == ["WARNING"]


def test_several_servers_have_one_file(tmp_path: Path, clock: _Clock) -> None:
    folder = tmp_path / "requests"
    with closing(History(folder, DAY_S, 2**20, clock)) as one, closing(History(folder, DAY_S, 2**20, clock)) as two:

        def work(history: History, first: int) -> None:
            for number in range(first, first + 60):
                add(history, record(number))
                if number % 7 == 0:
                    history.sweep()

        threads = [threading.Thread(target=work, args=args) for args in ((one, 0), (two, 1000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        two.summaries("", 1)
        assert sorted(map(int, ids(one))) == [*range(60), *range(1000, 1060)]


def test_another_releases_file_is_left_alone(history: History, caplog: pytest.LogCaptureFixture) -> None:
    history.path.parent.mkdir()
    with closing(sqlite3.connect(history.path)) as other:
        other.execute("PRAGMA user_version = 7")
    before = history.path.read_bytes()
    add(history, record(0))
    history.sweep()
    assert "another release" in caplog.text
    assert history.path.read_bytes()[28:] == before[28:]


def test_halves_of_surrogate_pairs(history: History) -> None:
    add(history, record(0, text="a\ud800b"))
    found = history.detail("", "0")
    assert found is not None
    assert (found["question"], found["answer"]) == ("a?b", "a?b")
