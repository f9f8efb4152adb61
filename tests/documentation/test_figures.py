"""Figures in the other pages are those of the records."""

from __future__ import annotations

import json
import re
from statistics import mean

import pytest

from .records import ROOT, prose, record, table


def test_commands_of_records_can_be_repeated_elsewhere() -> None:
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        command = json.loads(path.read_text(encoding="utf-8")).get("environment", {}).get("command", "")
        assert not re.search(r"(^|[\s=])/", command), f"{path.name} has a path of one machine: {command}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_attention_on_a_cpu(dtype: str) -> None:
    bounds: dict[str, dict[str, float]] = {}
    for bound in record("kernels_cpu.json")["bounds"]:
        if bound["dtype"] == dtype and bound["implementation"] == "native":
            name = "{}/{} x {}".format(*bound["heads"])
            bounds.setdefault(name, {})["share" if "its share" in bound["what"] else "worst"] = bound["found"]
    masked = {
        "{}/{} x {}".format(*row["heads"]): row["times_mask"]["native"]
        for row in record("kernels_cpu.json")["records"]
        if (row["dtype"], row["keys"], row["ratio"]) == (dtype, 4096, 0.15)
    }
    got = {row[1]: row[2:] for row in table("docs/kernels.md", "dtype") if row[0] == dtype}
    assert got == {
        name: [f"{found['share']:.2f}", f"{masked[name]:.2f}", f"{found['worst']:.2f}"]
        for name, found in bounds.items()
    }


def test_alternative_path() -> None:
    found = record("alternative_path.json")
    paper, here, real = found["paper"], found["simulation"], found["real_model"]
    prefills = [paper["redundant_of_baseline"], here["prefix"]["redundant_prefills"]]
    assert [row[1:] for row in table("docs/ingestion.md", "what")] == [
        [f"{paper['storage_saved']:.1%}", f"{here['storage_saved']:.1%}"],
        [f"{count:,}" for count in prefills],
        [f"{paper['redundant_saved']:.1%}", f"{here['redundant_saved']:.1%}"],
        [f"{paper['hit_rate']:.1%}", f"{here['hit_rate']:.1%}"],
    ]
    text = prose("docs/ingestion.md")
    chunks = here["chunks"]
    assert f"All {chunks['redundant_prefills']} repeated prefills" in text
    assert f"{chunks['adopted']} of {chunks['new_chunks']} new chunks" in text
    assert f"after {real['adopt_s']:.2f} s instead of {real['prefill_s']:.2f} s" in text
    assert real["largest_difference"] == 0.0


def test_vllm_with_a_store() -> None:
    want = []
    for length in record("vllm_connector_cpu.json")["lengths"]:
        rows = {row["what"]: row for row in length["rows"]}
        assert all(row["same_answers"] for row in length["rows"])
        alone, first, stored = rows["vllm"], rows["empty store"], rows["stored"]
        (loaded,) = set(stored["cached_tokens"])
        assert stored["counters"]["prompt_tokens_by_source.external_kv_transfer"] > 2 * loaded
        seconds = (mean(alone["cpu_s"]), first["cpu_s"][0], mean(stored["cpu_s"]))
        want.append([f"{length['num_tokens']:,}", f"{loaded:,}", *(f"{value:.2f} s" for value in seconds)])
    assert table("docs/vllm.md", "prompt tokens, about") == want


def test_made_questions_of_a_calibration_are_those_of_the_record() -> None:
    found = record("calibration_cpu.json")
    rows = {row[0]: row[1:] for row in table("docs/ratio.md", "agreement at ratio")}
    kinds, differences = found["kinds"], found["compared_with_asked"]["written"]["difference"]
    ratios = list(kinds["asked"]["mean"])
    assert ratios == ["0", "0.05", "0.15", "0.3", "0.5"]
    assert rows["asked by people"] == [f"{kinds['asked']['mean'][ratio]:.1%}".replace("%", " %") for ratio in ratios]
    assert rows["at least"] == [f"{kinds['asked']['at_least'][ratio]:.1%}".replace("%", " %") for ratio in ratios]
    assert rows["written by the model"] == [
        f"{kinds['written']['mean'][ratio]:.1%}".replace("%", " %") for ratio in ratios
    ]
    assert rows["difference, in points"] == [
        "{mean:.1f} ({low:.1f} to {high:.1f})".format(**{name: 100 * v for name, v in differences[ratio].items()})
        for ratio in ratios
    ]
    chosen = {
        kind: [kinds[kind]["choices"][target]["with_confidence"] for target in ("0.7", "0.85", "0.9", "0.95")]
        for kind in ("asked", "written")
    }
    assert chosen == {"asked": [0.0, 0.0, 0.15, 1.0], "written": [0.0, 0.0, 0.0, 1.0]}
