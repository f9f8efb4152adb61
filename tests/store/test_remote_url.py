"""A remote tier's password: in no message, in no warning, in nothing that is written down."""

from __future__ import annotations

import io
import traceback
from pathlib import Path

import pytest

from fused_kv_llm.errors import ConfigError, FusedKVError, FusedKVWarning
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.remote.url import public_url, scrub

PASSWORD = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("rediss://[::1]:6379/0?ssl_cert_reqs=none", "rediss://[::1]:6379/0?ssl_cert_reqs=none"),
        ("s3://bucket/prefix/a@b", "s3://bucket/prefix/a@b"),
        ("file:///mnt/share", "file:///mnt/share"),
        ("redis://:hunter2@host", "redis://host"),
        ("redis://user:hunter2@host:6379/0?db=3&password=hunter2", "redis://host:6379/0?db=3"),
        ("redis://:hun/ter2@host:6379", "redis://host:6379"),
        ("redis://:hun#ter2@host", "redis://host"),
        ("redis://:hun?ter2@host", "redis://host"),
        ("redis://:hun@ter/2@host", "redis://host"),
        ("redis://:hunter2@host?x=http://elsewhere", "redis://host"),
        ("s3://key:hunter2@bucket/prefix", "s3://bucket/prefix"),
        ("simplecache::ftp://user:hunter2@host/x", "simplecache::ftp://host/x"),
        ("zip://inner::ftp://user:hunter2@host/x", "zip://host/x"),
        ("https://host/path?sig=hunter2", "https://host/path"),
        ("user:hunter2@host/x", "host/x"),
        (["redis://:hunter2@host"], "<list>"),
    ],
)
def test_what_is_shown_of_a_url(url: object, shown: str) -> None:
    assert public_url(url) == shown
    # What is shown is a URL that has no secrets.
    assert isinstance(url, list) or public_url(shown) == shown


@pytest.mark.parametrize("url", ["redis://:hunter2@host", "redis://:hunter%32@host", "redis://host?password=hunter2"])
def test_messages_of_backends_are_scrubbed(url: str) -> None:
    for text in (url, f"cannot reach {url}", "wrong password hunter2", "Error 111 connecting to host:6379"):
        said = scrub(text, url)
        assert PASSWORD not in said
        assert ("111" in said) == ("111" in text)
    assert scrub("bad secret: s3cret", "s3://bucket", {"secret": "s3cret", "region": "bad"}) == "bad secret: ***"


class Teller:
    """A file system whose every error quotes what it was opened with."""

    protocol = "teller"

    def __init__(self, url: str) -> None:
        self._url = url

    def __getattr__(self, name: str) -> object:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError(f"{name} of {self._url} failed")

        return fail


def said_by(error: BaseException) -> str:
    """Return everything that a traceback shows of an error."""
    text = io.StringIO()
    traceback.print_exception(error, file=text, chain=True)
    return "\n".join(line for line in text.getvalue().splitlines() if not line.startswith("    "))


@pytest.mark.parametrize(
    "url",
    [
        ":hunter2@host:6379",
        "redis://:hunter2@localhost:1/0",
        "redis://localhost:1/0?password=hunter2",
        "redis://:hunter2/x@localhost:1",
        "nothing://:hunter2@host/x",
        "ftp://user:hunter2@localhost:1/x",
    ],
)
def test_errors_of_opening(kv_dir: Path, url: str) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("redis")
    with pytest.raises((FusedKVError, FusedKVWarning)) as caught:
        KVStore(kv_dir, remote=url)
    assert "hunter" not in said_by(caught.value)
    assert "remote" in str(caught.value)


def test_errors_and_warnings_of_a_store(kv_dir: Path, make_chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    url = "memory://user:hunter2@bucket/kv"
    chunk = make_chunk()
    with KVStore(kv_dir, remote=url, memory_bytes=0) as store:
        chunk.put(store)
        assert store.evict(0) == 1
        monkeypatch.setattr(store._parts.tier, "_fs", Teller(url))
        with pytest.warns(FusedKVWarning) as caught:
            assert chunk.open(store) is None
        assert "could not be brought" in str(caught[0].message)
        assert all(PASSWORD not in str(warning.message) for warning in caught)
        with pytest.raises(FusedKVError) as failed:
            store.delete([chunk.key])
        assert PASSWORD not in said_by(failed.value)
        assert PASSWORD not in repr(vars(store)) + repr(store)


def test_a_damaged_object_is_named_without_it(kv_dir: Path, make_chunk) -> None:
    pytest.importorskip("fsspec")
    chunk = make_chunk()
    with KVStore(kv_dir, remote="memory://user:hunter2@bucket/damaged", memory_bytes=0) as store:
        chunk.put(store)
        store.evict(0)
        store._parts.tier.put(f"{chunk.key}.safetensors", [memoryview(b"no chunk")])
        with pytest.warns(FusedKVWarning, match="memory://bucket/damaged") as caught:
            assert chunk.open(store) is None
        assert all(PASSWORD not in str(warning.message) for warning in caught)


def test_a_url_is_a_string(kv_dir: Path) -> None:
    with pytest.raises(ConfigError, match="<list>") as caught:
        KVStore(kv_dir, remote=["redis://:hunter2@host"])
    assert PASSWORD not in str(caught.value)
