"""Libraries of many names: none is made by asking for it, few are open at once, and there are only so many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from models import smollm2_tokenizer, tiny_model
from server.documents import ENDED, retrieve, text_of, upload
from server.running import running
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app
from fused_kv_llm.server.libraries import Libraries
from fused_kv_llm.server.library_schema import Owner
from fused_kv_llm.server.refusals import RefusedError
from fused_kv_llm.server.tenants import Tenants


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    folder = tmp_path_factory.mktemp("kv")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path, engine: FusedKVEngine) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False}
    with FusedKVEngine(engine.loaded, kv_dir=tmp_path, **options) as made:
        yield made


@contextmanager
def client_of(engine: FusedKVEngine, **options: object) -> Iterator[httpx.Client]:
    config = ServerConfig(model_name="tiny", chunk_chars=300, **options)
    with running(create_app(engine, config)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def open_files(folder: Path) -> set[str]:
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link) and str(folder) in os.readlink(link)}


def done(client: httpx.Client, job: str, **params: str) -> None:
    def over() -> bool:
        state = client.get(f"/v1/jobs/{job}", params=params).json()["state"]
        assert state == "done" or state not in ENDED
        return bool(state == "done")

    wait_until(over, timeout_s=60)


def test_asking_makes_no_library(own: FusedKVEngine) -> None:
    with client_of(own) as client:
        for number in range(5):
            params = {"tenant": f"user {number}"}
            assert client.get("/v1/documents", params=params).json()["data"] == []
            assert client.get("/v1/jobs", params=params).json()["data"] == []
            assert client.get("/v1/documents/doc-none", params=params).status_code == 404
        assert retrieve(client, "anything").json()["error"]["code"] == "no_documents"
        assert not (own.store.kv_dir / "documents").exists()


def test_few_are_open_at_once_and_all_are_found(own: FusedKVEngine) -> None:
    names = [f"user {number}" for number in range(6)]
    with client_of(own, max_tenants=2) as client:
        for number, name in enumerate(names):
            made = client.post("/v1/documents", params={"tenant": name}, json={"text": text_of(number), "name": name})
            done(client, made.json()["job_id"], tenant=name)
        folder = own.store.kv_dir / "documents"
        assert len(list(folder.glob("*.sqlite"))) == 6
        assert sum(name.endswith(".sqlite") for name in open_files(folder)) <= 2
        for number, name in enumerate(names):
            found = client.get("/v1/documents", params={"tenant": name}).json()["data"]
            assert [one["name"] for one in found] == [name]
            # Its index is made anew when it was closed meanwhile.
            options = {"retrieve": {"k": 1}, "tenant": name}
            answer = retrieve(client, text_of(number), fused_kv=options).json()
            assert [one["name"] for one in answer["fused_kv"]["retrieved"]] == [name]


def test_a_library_with_waiting_jobs_stays_open(own: FusedKVEngine) -> None:
    """Whoever opens its file again would take its jobs for interrupted."""
    tenants, owners = Tenants(own, 8), [Owner("one", None), Owner("two", None)]
    libraries = Libraries(tenants, 1, 10)
    with ExitStack() as entered:
        entered.callback(tenants.close)
        entered.callback(libraries.close)
        engines = [entered.enter_context(tenants.using(*owner)) for owner in owners]
        with libraries.using(engines[0], owners[0], make=True) as library:
            job = library.add("a", ".txt", b"text", "{}", None)[1]
        with pytest.raises(RefusedError, match="too many"), libraries.using(engines[1], owners[1], make=True):
            pass
        with libraries.using(engines[0], owners[0]) as same:
            assert same is library
            assert same.move_job(job, "done", among=("queued",))
        with libraries.using(engines[1], owners[1], make=True) as library:
            assert library.documents(1) == []


def test_there_are_only_so_many_names(own: FusedKVEngine) -> None:
    with client_of(own, max_names=2) as client:
        statuses = [
            client.post("/v1/documents", params={"tenant": name}, json={"text": text_of(0)}).status_code
            for name in ("a", "b", "c", "a")
        ]
        assert statuses == [202, 202, 429, 202]
        # The tenant's own are not below a name.
        upload(client, text_of(1))


def test_what_documents_take_is_known_open_or_closed(own: FusedKVEngine) -> None:
    tenants = Tenants(own, 8)
    with ExitStack() as entered:
        entered.callback(tenants.close)
        libraries = Libraries(tenants, 1, 10)
        for tenant, apart, nbytes in (("one", None, 10), ("one", "x", 20), ("two", None, 40)):
            owner = Owner(tenant, apart)
            with tenants.using(*owner) as engine, libraries.using(engine, owner, make=True) as library:
                document, job = library.add("a", ".txt", b"." * nbytes, "{}", None)
                library.move_job(job, "cancelled", among=("queued",))
                assert library.document(document) is not None
        assert (libraries.document_bytes("one"), libraries.document_bytes("two")) == (30, 40)
        libraries.close()
        # Another server reads them from the files.
        again = Libraries(tenants, 1, 10)
        assert (again.document_bytes("one"), again.document_bytes("two")) == (30, 40)
        assert set(again.owners()) == {("one", None), ("one", "x"), ("two", None)}
        with tenants.using("one") as engine, again.using(engine, Owner("one", None)) as library:
            assert again.remove(engine, library, library.documents(1)[0].id)
        assert again.document_bytes("one") == 20
        again.close()


def test_one_that_is_in_use_is_not_closed(own: FusedKVEngine) -> None:
    tenants, owners = Tenants(own, 8), [Owner("one", None), Owner("two", None)]
    libraries = Libraries(tenants, 1, 10)
    with ExitStack() as entered:
        entered.callback(tenants.close)
        entered.callback(libraries.close)
        engines = [entered.enter_context(tenants.using(*owner)) for owner in owners]
        with libraries.using(engines[0], owners[0], make=True) as library:
            with (
                pytest.raises(RefusedError, match="too many"),
                libraries.using(engines[1], owners[1], make=True),
            ):
                pass
            assert library.documents(1) == []
        with libraries.using(engines[1], owners[1], make=True) as library:
            assert library.documents(1) == []
