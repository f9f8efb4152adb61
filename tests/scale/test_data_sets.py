"""Data sets that cannot be read: what stands for one here needs no cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fused_kv_llm.errors import CorpusError, IngestionFailedError
from fused_kv_llm.scale.corpus_reader import read_corpus

pytest.importorskip("ray")
# Ray's own warnings, when it is imported, are no concern of these tests.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(name="data_set")
def _data_set() -> Any:
    import ray.data

    class DataSet(ray.data.Dataset):  # type: ignore[misc]
        """Has a schema and rows as it is told; None is an error of Ray's."""

        def __init__(self, schema: Any, rows: Any) -> None:
            self._given = schema, rows

        def schema(self) -> Any:
            return self._given[0]()

        def select_columns(self, columns: Any) -> Any:
            return self

        def iter_rows(self) -> Any:
            return self._given[1]()

        def __repr__(self) -> str:
            return "DataSet"

        def __del__(self) -> None:
            pass

    return DataSet


def dies() -> Any:
    from ray.exceptions import WorkerCrashedError

    raise WorkerCrashedError


def read(data_set: Any) -> list[str]:
    return read_corpus(data_set, chunk_chars=1000, text_column="text")


def test_a_data_set_without_rows_is_nothing_to_ingest(data_set: Any) -> None:
    with pytest.raises(CorpusError, match="is empty"):
        read(data_set(lambda: None, dies))


def test_workers_that_fail_are_said_to_have_failed_at_reading(data_set: Any) -> None:
    with pytest.raises(IngestionFailedError, match="Reading on Ray failed"):
        read(data_set(dies, dies))
    schema = SimpleNamespace(names=["text"])
    with pytest.raises(IngestionFailedError, match="Reading on Ray failed"):
        read(data_set(lambda: schema, dies))
    assert read(data_set(lambda: schema, lambda: iter([{"text": "a"}]))) == ["a"]
