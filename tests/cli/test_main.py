"""The command line on a small folder, with the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import faiss
import pytest
from typer.testing import CliRunner, Result

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.cli import app
from fused_kv_llm.demo.comparison import compare
from fused_kv_llm.demo.embedder import MiniLM
from fused_kv_llm.demo.passages import Passage, read_passages, split_text
from fused_kv_llm.demo.retrieval import PassageIndex
from fused_kv_llm.errors import ConfigError, CorpusError, FusedKVWarning, MissingExtraError
from fused_kv_llm.store import KVStore
from fused_kv_llm.tuning.baseline import full_prefill

TEXTS = [
    "The harbour office at Skeldra opens at 06:30 and closes at 22:00. Berths are given out by radio on "
    "channel 12, and a vessel that is late by more than an hour loses its berth to the next in the queue.",
    "The lighthouse on Ulvane Point was built in 1874 and stands 38 metres high. Its lamp turns once every "
    "ten seconds and is seen from nineteen nautical miles away in clear weather.",
    "Dogs travel free of charge on every ferry, but they stay on a lead and outside the restaurant. A cabin "
    "for people who travel with a dog costs nine pounds more than an ordinary cabin.",
]


def run(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    (made / "harbour.txt").write_text(TEXTS[0] + "\n\n" + TEXTS[1], encoding="utf-8")
    (made / "notes").mkdir()
    (made / "notes" / "dogs.md").write_text(TEXTS[2], encoding="utf-8")
    (made / "notes" / "picture.png").write_bytes(b"\x89PNG")
    (made / ".git").mkdir()
    (made / ".git" / "description.txt").write_text("Nobody wants to ask about this.")
    return made


@pytest.fixture(scope="session")
def kv_dir(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    made = tmp_path_factory.mktemp("store") / "kv"
    result = run("ingest", folder, "--kv-dir", made, "--chunk-chars", "250")
    assert result.exit_code == 0, result.output
    assert "3 passages, files read: 2" in result.output
    assert "3 chunks prefilled" in result.output
    return made


def test_ingest_writes_passages_and_vectors(kv_dir: Path) -> None:
    lines = [json.loads(line) for line in (kv_dir / "passages.jsonl").read_text().splitlines()]
    assert sorted(line["text"] for line in lines) == sorted(TEXTS)
    assert faiss.read_index(str(kv_dir / "faiss" / "index.faiss")).ntotal == 3
    assert json.loads((kv_dir / "faiss" / "corpus.json").read_text())["options"]["model"] == "smollm2-135m"
    assert not list(kv_dir.rglob("*.pkl"))


def test_ingesting_again_computes_nothing(kv_dir: Path, folder: Path) -> None:
    result = run("ingest", folder, "--kv-dir", kv_dir, "--chunk-chars", "250")
    assert result.exit_code == 0
    assert "0 chunks prefilled" in result.output
    assert "3 already stored" in result.output


def test_ask_answers_and_reports(kv_dir: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    options = ["--kv-dir", kv_dir, "--max-tokens", "20", "--k", "2", "--html", page]
    result = run("ask", "How high is the lighthouse?", *options)
    assert result.exit_code == 0, result.output
    assert f"The report is in {page}" in result.output
    assert "<title>How high is the lighthouse?</title>" in page.read_text()
    assert re.search(r'"source": "[^"]*harbour.txt", "score": 0\.\d+', page.read_text())
    assert "first token after" in result.output
    assert "2 chunks found" in result.output
    sources = [line for line in result.output.splitlines() if line.startswith("  ")]
    assert len(sources) == 2
    assert re.match(r"  harbour\.txt \(0\.\d\d\): The lighthouse on Ulvane Point", sources[0])
    reused = re.search(r"prompt tokens: (\d+) reused", result.output)
    assert reused is not None
    assert int(reused[1]) > 50


def test_ask_as_json_has_stdout_for_itself(kv_dir: Path) -> None:
    result = run("ask", "How high is the lighthouse?", "--kv-dir", kv_dir, "--max-tokens", "4", "--k", "2", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["sources"][0]["text"] == TEXTS[1]
    assert 1 >= said["sources"][0]["score"] > said["sources"][1]["score"] > -1
    assert said["report"]["completion_tokens"] <= 4
    assert said["answer"]
    assert said["answer"] in result.stderr
    assert "ways" not in said


def test_compare_shows_every_way(kv_dir: Path) -> None:
    result = run("ask", "What do dogs cost?", "--kv-dir", kv_dir, "--max-tokens", "6", "--compare")
    assert result.exit_code == 0, result.output
    ways = ("plain transformers", "no stored KV (ratio 1)", "fused (ratio 0.15)", "full reuse (ratio 0)")
    for words in (*ways, "cold", "warm", "x from stored KV"):
        assert words in result.output


def test_stats(kv_dir: Path) -> None:
    result = run("store", "stats", "--kv-dir", kv_dir)
    assert result.exit_code == 0
    assert re.search(r"chunks\s*│\s*3\s", result.output)


@pytest.mark.parametrize("command", [["ingest"], ["ask"], ["demo"], ["store", "stats"], []])
def test_help(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def check_error(result: Result, *words: str) -> None:
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_error(run("ingest", tmp_path / "empty", "--kv-dir", tmp_path / "kv"), "No text", ".pdf")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    check_error(run("ingest", tmp_path / "nothing", "--kv-dir", tmp_path / "kv"), "nothing")


def test_a_kv_dir_that_is_a_file(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "kv").write_text("in the way")
    check_error(run("ingest", folder, "--kv-dir", tmp_path / "kv"), "kv")
    check_error(run("ask", "Why?", "--kv-dir", tmp_path / "kv"), "is a file")
    check_error(run("store", "stats", "--kv-dir", tmp_path / "kv"), "kv")


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    check_error(run("ask", "Why?", "--kv-dir", tmp_path / "kv"), "ingest")
    check_error(run("store", "stats", "--kv-dir", tmp_path / "kv"), "no KV store")


def test_an_unknown_model(tmp_path: Path, folder: Path) -> None:
    missing = tmp_path / "no-such-model"
    check_error(run("ingest", folder, "--kv-dir", tmp_path / "kv", "--model", missing), "no-such-model")


def test_options_that_cannot_work(kv_dir: Path) -> None:
    check_error(run("ask", "Why?", "--kv-dir", kv_dir, "--html", kv_dir), "--html", "report.html")
    check_error(run("ask", "Why?", "--kv-dir", kv_dir, "--selector", "best"), "best", "fusionrag")
    check_error(run("ask", "Why?", "--kv-dir", kv_dir, "--ratio", "1.5"), "recompute_ratio=1.5")


def test_an_index_that_does_not_fit_its_passages(kv_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "faiss").mkdir()
    for name in ("passages.jsonl", "faiss/index.faiss", "faiss/corpus.json"):
        (tmp_path / name).write_bytes((kv_dir / name).read_bytes())
    with (tmp_path / "passages.jsonl").open("a") as file:
        file.write(json.dumps({"text": "forged", "source": "x"}) + "\n")
    check_error(run("ask", "Why?", "--kv-dir", tmp_path), "run fused-kv ingest again")
    (tmp_path / "passages.jsonl").write_bytes((kv_dir / "passages.jsonl").read_bytes())
    (tmp_path / "faiss" / "index.faiss").write_bytes(b"not an index")
    check_error(run("ask", "Why?", "--kv-dir", tmp_path), "run fused-kv ingest again")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_stops_and_the_same_command_goes_on(tmp_path: Path) -> None:
    handbook = sorted(map(str, (files("fused_kv_llm.demo") / "handbook").iterdir()))[:1]
    kv_dir = tmp_path / "kv"
    # The second pass takes long, and what interrupts it is tested beside it.
    once = ["--preprocessing", "none"]
    # A shell's background jobs ignore the signal, and so would their children.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from fused_kv_llm.cli import app; app(sys.argv[1:])"
    )
    roots = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "ingest", *handbook, "--kv-dir", str(kv_dir), *once],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": roots},
    )
    deadline = time.monotonic() + 120
    while not list(kv_dir.glob("chunks/*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Stopped" in output
    assert "Traceback" not in output
    with KVStore(kv_dir, read_only=True) as store:
        stored = store.stats().chunks
    assert 0 < stored < len(read_passages(map(Path, handbook)))
    assert f"{stored} already stored" in run("ingest", *handbook, "--kv-dir", kv_dir, *once).output


def test_changed_files_replace_their_passages(tmp_path: Path) -> None:
    embedder = MiniLM()
    old = [Passage("The ferry is red.", "a"), Passage("The quay is long.", "b")]
    PassageIndex.update(tmp_path, old, model="m", dtype="float32", embedder=embedder)
    new = [Passage("The ferry is blue.", "a")]
    PassageIndex.update(tmp_path, new, model="m", dtype="float32", embedder=embedder)
    index = PassageIndex.open(tmp_path, embedder)
    assert {passage.text for passage in index.passages} == {"The quay is long.", "The ferry is blue."}
    assert index.search("Which colour has the ship?", 1)[0].text == "The ferry is blue."
    assert len(index.search("anything", 50)) == 2


def test_splitting_at_blank_lines() -> None:
    assert split_text("one\n\n \n  two\n\nthree", 1000) == ["one\n\ntwo\n\nthree"]
    assert split_text("a" * 90 + "\n\n" + "b" * 90, 100) == ["a" * 90, "b" * 90]
    long = " ".join(f"Sentence number {number} of a long paragraph." for number in range(100))
    pieces = split_text(long, 300)
    assert max(map(len, pieces)) <= 300
    assert " ".join(pieces) == long
    assert all(piece.endswith(".") for piece in pieces)
    assert max(map(len, split_text("x" * 1000, 300))) <= 300
    assert split_text(" \n\n \n", 300) == []


def _write_pdf(path: Path, text: str) -> None:
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R"
        b"/Resources<</Font<</F1<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
    ]
    body = b"%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    rows = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    table = b"xref\n0 5\n0000000000 65535 f \n" + rows
    path.write_bytes(body + table + b"trailer<</Size 5/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(body))


def test_reading_a_pdf(tmp_path: Path) -> None:
    _write_pdf(tmp_path / "rules.pdf", "Smoking is allowed on the open deck only.")
    assert read_passages([tmp_path]) == [
        Passage("Smoking is allowed on the open deck only.", str(tmp_path / "rules.pdf"))
    ]


@pytest.mark.parametrize(("name", "content"), [("bad.pdf", b"%PDF-1.4 not really"), ("bad.txt", b"caf\xe9 au lait")])
def test_unreadable_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("Something to read.")
    with pytest.raises(CorpusError, match=name):
        read_passages([tmp_path / name])
    with pytest.warns(FusedKVWarning, match=name):
        assert len(read_passages([tmp_path])) == 1


def test_files_of_other_types_and_tiny_chunks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "table.xlsx").write_text("1,2")
    with pytest.raises(CorpusError, match=r"table\.xlsx"):
        read_passages([tmp_path / "table.xlsx"])
    with pytest.raises(ConfigError, match="chunk_chars=5"):
        read_passages([tmp_path], chunk_chars=5)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _write_pdf(tmp_path / "rules.pdf", "Hello")
    monkeypatch.setitem(__import__("sys").modules, "pypdf", None)
    with pytest.raises(MissingExtraError, match=r"fused-kv-llm\[demo\]"):
        read_passages([tmp_path])


def test_the_comparison_is_with_the_same_ids_and_leaves_the_engine_as_it_was(kv_dir: Path) -> None:
    with FusedKVEngine("smollm2-135m", kv_dir=kv_dir) as engine:
        prompt = "\n\n".join(TEXTS) + "\n\nQuestion: How high is the lighthouse?"
        before = engine.generate(prompt, max_tokens=8).text
        plain = full_prefill(engine, prompt, max_tokens=8)
        rows = compare(engine, prompt, ratios=[0.0, 1.0], max_tokens=8)
        assert engine.generate(prompt, max_tokens=8).text == before
        assert plain.prompt_tokens == len(engine.encode(prompt)) == rows[1].prompt_tokens
        assert rows[0].answer == rows[2].answer == plain.text
        assert rows[1].computed_tokens < rows[2].computed_tokens <= rows[0].computed_tokens
        inputs = engine.tokenizer(engine.renderer.render(prompt).text, return_tensors="pt")
        whole = engine.model.generate(**inputs, max_new_tokens=8, do_sample=False)
        assert whole[0, inputs["input_ids"].shape[1] :].tolist()[: len(plain.token_ids)] == plain.token_ids
        with pytest.raises(ConfigError, match="max_tokens=0"):
            full_prefill(engine, prompt, max_tokens=0)
