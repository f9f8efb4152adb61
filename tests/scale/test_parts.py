"""The pool of actors, the sharded search and the reading of corpora, each by itself."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fused_kv_llm.errors import ConfigError, CorpusError, IngestionFailedError, StoreFullError, StoreUnavailableError
from fused_kv_llm.offline import nearest
from fused_kv_llm.scale import actor_pool
from fused_kv_llm.scale.actor_pool import ActorPool
from fused_kv_llm.scale.corpus_reader import read_corpus
from fused_kv_llm.scale.neighbours import ShardedSearch

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]


class Worker:
    """Does what its tasks say; a file counts how often."""

    def __init__(self, folder: str, dies: str = "") -> None:
        self._folder, self._dies = Path(folder), dies

    def start(self) -> str:
        if self._dies == "always" or (self._dies == "once" and self._first("start")):
            os._exit(1)
        if self._dies == "refuses":
            raise ConfigError("no such model")
        return "facts"

    def work(self, number: int, what: str = "") -> int:
        first = self._first(str(number))
        if what == "dies" or (what == "dies once" and first):
            os._exit(1)
        if what == "away" or (what == "away once" and first):
            raise StoreUnavailableError("the store is away")
        if what == "full":
            raise StoreFullError("no room")
        if what == "bug":
            raise KeyError("a bug")
        return number * number

    def _first(self, name: str) -> bool:
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@pytest.fixture(name="pool_of")
def _pool_of(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(actor_pool, "_AGAIN_AFTER_S", 0.01)
    pools = []

    def make(count: int = 2, dies: str = "", **resources: Any) -> ActorPool[str]:
        kind = ray.remote(num_cpus=1, **resources)(Worker)
        pools.append(ActorPool[str](lambda: kind.remote(str(tmp_path), dies), count))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_every_task_is_done_once_and_those_that_fail_are_tried_again(pool_of: Any) -> None:
    pool = pool_of()
    assert pool.facts() == "facts"
    assert dict(pool.run("work", ((number,) for number in range(40)))) == {n: n * n for n in range(40)}
    assert (pool.replaced, pool.retried) == (0, 0)
    tasks = [(100, "dies once"), *((number,) for number in range(101, 120)), (120, "away once"), (121, "dies once")]
    assert dict(pool.run("work", tasks)) == {at: task[0] ** 2 for at, task in enumerate(tasks)}
    assert pool.replaced == 2
    assert pool.retried >= 3
    assert list(pool.run("work", [])) == []


def test_what_cannot_work_ends_the_run(pool_of: Any) -> None:
    pool = pool_of(1)
    with pytest.raises(StoreUnavailableError, match="away"):
        list(pool.run("work", [(200, "away")]))
    with pytest.raises(StoreFullError, match="no room"):
        list(pool.run("work", [(201, "full")]))
    with pytest.raises(IngestionFailedError, match="a bug"):
        list(pool.run("work", [(202, "bug")]))
    assert pool.replaced == 0
    with pytest.raises(IngestionFailedError, match="died over a batch"):
        list(pool.run("work", [(203, "dies")]))


def test_actors_that_cannot_start(pool_of: Any) -> None:
    assert pool_of(1, "once").facts() == "facts"
    with pytest.raises(ConfigError, match="no such model"):
        pool_of(1, "refuses").facts()
    with pytest.raises(IngestionFailedError, match="keep dying"):
        pool_of(1, "always").facts()


def test_more_actors_than_fit_do_the_work_with_those_that_fit(pool_of: Any) -> None:
    pool = pool_of(4)
    assert dict(pool.run("work", ((number,) for number in range(300, 312)))).keys() == set(range(12))


def test_a_sharded_search_finds_what_one_search_does(ray: Any) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((500, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[40:300]
    similarity, rows = nearest(vectors, queries, 10)
    for size in (64, 500, 7):
        sharded, places = ShardedSearch(size)(vectors, queries, 10)
        assert np.array_equal(places, rows)
        np.testing.assert_allclose(sharded, similarity, atol=1e-6)


def test_a_corpus_is_read_from_files_data_sets_and_texts(ray: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("First file.\n\n" + "word " * 60)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.md").write_text("Second file.")
    lines = tmp_path / "c.jsonl"
    lines.write_text("\n".join(json.dumps({"text": f"Line {n}", "n": n}) for n in range(3)) + "\n\n")
    assert read_corpus([tmp_path], chunk_chars=1000, text_column="text") == [
        "First file.\n\n" + ("word " * 60).strip(),
        "Second file.",
    ]
    assert read_corpus(lines, chunk_chars=1000, text_column="text") == ["Line 0", "Line 1", "Line 2"]
    both = read_corpus([lines, tmp_path / "a.txt"], chunk_chars=200, text_column="text")
    assert both[:4] == ["Line 0", "Line 1", "Line 2", "First file."]
    assert read_corpus(["one", "two"], chunk_chars=1000, text_column="text") == ["one", "two"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = ray.data.from_items([{"body": "one"}, {"body": "two"}])
        assert sorted(read_corpus(dataset, chunk_chars=1000, text_column="body")) == ["one", "two"]
        with pytest.raises(ConfigError, match="body"):
            read_corpus(dataset, chunk_chars=1000, text_column="text")


def test_corpora_that_cannot_be_read(ray: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": 3}\n')
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00bad")
    for corpus, told in (
        ("one string", "one string"),
        (7, "int"),
        ([tmp_path, "text"], "one or the other"),
        (tmp_path / "missing.txt", "no file or folder"),
        (bad, "Line 2"),
        (binary, "UTF-8"),
    ):
        with pytest.raises(CorpusError, match=told):
            read_corpus(corpus, chunk_chars=1000, text_column="text")
