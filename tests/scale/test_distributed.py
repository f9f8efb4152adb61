"""Ingestion by two Ray actors: the bytes of one process, whatever dies; into Redis, S3 and a folder."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from letters import LetterFrequencies
from mortal_pool import mortal
from services import Remote, redis_server, s3_server

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_passages
from fused_kv_llm.errors import ConfigError, CorpusError, StoreUnavailableError
from fused_kv_llm.scale import ActorResources, DistributedIngestReport, build_kv_cache_distributed, ingestion

# Only `make test-ray` and `make test-heavy` wait for Ray.
pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("default")]
OPTIONS: dict[str, Any] = {"batch_tokens": 256, "num_neighbours": 3, "preprocessing_prompts": 4}
TEXTS = 80


@pytest.fixture(scope="module")
def texts() -> list[str]:
    found = handbook_passages()[:TEXTS]
    # One twice, and one that cannot be found in a prompt.
    return [*found, found[3], "x"]


@pytest.fixture(scope="module")
def by_one_process(model_folder: Path, texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files that an engine makes of the texts in one process."""
    folder = tmp_path_factory.mktemp("one")
    with FusedKVEngine(str(model_folder), kv_dir=folder, embedder=LetterFrequencies(), **OPTIONS) as engine:
        engine.build_kv_cache(texts, preprocess="wait", progress=False)
    files = [*folder.glob("chunks/*/*.safetensors")]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


def open_remote(kind: str, request: pytest.FixtureRequest, folder: Path) -> Remote:
    name = uuid.uuid4().hex
    if kind == "file":
        return Remote(f"file://{folder}/shared")
    if kind == "redis":
        return Remote(request.getfixturevalue("redis_url"), {"prefix": f"{name}:"})
    keys = {"key": "test", "secret": "test", "endpoint_url": request.getfixturevalue("s3_url")}
    return Remote(f"s3://bucket-{name}/folder", keys)


def ingest(corpus: Any, model: Path, remote: Remote, kv_dir: Path, **options: Any) -> DistributedIngestReport:
    settings = {"embedder": LetterFrequencies(), "progress": False, "actors": ActorResources(2), **OPTIONS, **options}
    return build_kv_cache_distributed(
        corpus, str(model), remote.url, kv_dir=kv_dir, store_options=remote.options, **settings
    )


def objects(remote: Remote) -> dict[str, bytes]:
    tier = remote.open()
    return tier.get(list(tier.sizes()))


@pytest.mark.parametrize(("kind", "method"), [("redis", "prefill"), ("s3", "preprocess"), ("file", None)])
def test_two_actors_store_what_one_process_does_even_if_one_is_killed(
    ray: Any,
    kind: str,
    method: str | None,
    request: pytest.FixtureRequest,
    texts: list[str],
    by_one_process: dict[str, bytes],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = open_remote(kind, request, tmp_path)
    if method is not None:
        monkeypatch.setattr(ingestion, "ActorPool", mortal(method, 2))
    report = ingest(texts, model_folder, remote, tmp_path / "local")
    assert report.actors_replaced == (0 if method is None else 1)
    assert (report.batches_retried > 0) == (method is not None)
    found = objects(remote)
    assert found.keys() == by_one_process.keys(), "nothing is lost, nothing is there twice"
    assert [name for name in found if found[name] != by_one_process[name]] == []
    chunks = sum(name.count(".") == 1 for name in found)
    assert (report.chunks_new, report.chunks_preprocessed, report.chunks_pending) == (chunks, chunks, 0)
    assert (report.chunks_duplicate, report.chunks_skipped, report.chunks_total) == (1, 1, len(texts))
    if kind == "redis":
        calls = remote.open()._client.info("commandstats")["cmdstat_set"]["calls"]  # type: ignore[attr-defined]
        assert calls == len(found), "every object was written once, also by the batch that was computed again"
    monkeypatch.undo()
    again = ingest(texts, model_folder, remote, tmp_path / "local")
    assert (again.chunks_new, again.chunks_present, again.bytes_written) == (0, chunks, 0)
    # Another machine learns all of it, and every object is sound.
    with remote.store(tmp_path / "replica") as store:
        assert store.stats().tiers["remote"][0] == chunks
        assert store.shared.check().findings == []


def test_it_goes_on_where_another_machine_stopped_and_prunes(
    ray: Any, texts: list[str], model_folder: Path, by_one_process: dict[str, bytes], tmp_path: Path
) -> None:
    remote = Remote(f"file://{tmp_path}/shared")
    first = ingest(texts[:50], model_folder, remote, tmp_path / "one", preprocess="later")
    assert (first.chunks_new, first.chunks_preprocessed) == (50, 0)
    with remote.store(tmp_path / "replica") as replica:
        key = next(iter(replica.shared.present([name.partition(".")[0] for name in objects(remote)])))
        replica.fetch([key])
        # The driver is another machine, which has nothing on its disk.
        second = ingest(texts[10:TEXTS], model_folder, remote, tmp_path / "two", prune=True, actors=ActorResources(1))
        assert second.chunks_present == 40
        assert second.chunks_deleted == 10
        assert second.chunks_preprocessed == second.chunks_new + 40
        assert replica.shared.refresh().gone == 10
    with remote.store(tmp_path / "three", learn=False) as store:
        assert store.shared.check().by_kind.keys() <= {"orphaned"}
    kept = {name for name in objects(remote) if name in by_one_process}
    assert len({name[:64] for name in kept}) == second.chunks_new + 40


def test_what_the_drivers_folder_has_already_is_published_and_not_computed(
    ray: Any, texts: list[str], model_folder: Path, by_one_process: dict[str, bytes], tmp_path: Path
) -> None:
    remote = Remote(f"file://{tmp_path}/shared")
    with FusedKVEngine(str(model_folder), kv_dir=tmp_path / "kv", embedder=LetterFrequencies(), **OPTIONS) as engine:
        engine.build_kv_cache(texts, preprocess="wait", progress=False)
    report = ingest(texts, model_folder, remote, tmp_path / "kv", actors=ActorResources(1))
    assert (report.chunks_new, report.chunks_preprocessed) == (0, 0)
    assert report.bytes_written > 0
    found = objects(remote)
    assert found == by_one_process


def test_errors_of_actors_are_the_callers(ray: Any, texts: list[str], tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/shared")
    with pytest.raises(Exception, match="nowhere") as caught:
        ingest(texts, tmp_path / "nowhere", remote, tmp_path / "kv", preprocessing="none")
    assert type(caught.value).__module__ == "fused_kv_llm.errors"
    with pytest.raises(StoreUnavailableError, match="remote tier"):
        ingest(texts, tmp_path, Remote("file:///proc/none/of/this"), tmp_path / "kv", preprocessing="none")
    with pytest.raises(CorpusError, match="empty"):
        ingest([], Path("smollm2-135m"), remote, tmp_path / "kv", preprocessing="none", actors=ActorResources(1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"store_url": None}, "store_url"),
        ({"model": object()}, "model in memory"),
        ({"preprocess": "background"}, "preprocess="),
        ({"remote": "s3://x/y"}, "given twice"),
        ({"no_such_option": 1}, "no option"),
    ],
)
def test_wrong_options_are_refused_before_ray_starts(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    given = {"model": "smollm2-135m", "store_url": f"file://{tmp_path}", "kv_dir": tmp_path, **options}
    with pytest.raises(ConfigError, match=told):
        build_kv_cache_distributed(["a text"], **given)
