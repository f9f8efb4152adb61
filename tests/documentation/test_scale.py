"""Figures in docs/scale.md are those of the records."""

from __future__ import annotations

from typing import Any

from .records import prose, record, table

PAGE = "docs/scale.md"


def test_ingestion_on_ray() -> None:
    (run,) = record("ray_ingestion_cpu.json")["runs"]
    assert (run["passages"], run["passes"], run["files"]) == (802, 2, 1605)
    text = prose(PAGE)
    assert f"the 802 passages of a corpus, {run['tokens']:,} tokens" in text
    assert f"all {run['files']:,} objects ({run['bytes'] / 1e9:.1f} GB)" in text
    assert {row["store"]: row["killed_in"] for row in run["two_actors"]} == {"redis": "preprocess", "s3": "prefill"}
    for row in run["two_actors"]:
        assert (row["objects"], row["identical"], row["lost"], row["more"]) == (run["files"], run["files"], 0, 0)
        assert row["actors_replaced"] > 0
        assert row.get("writes", run["files"]) == run["files"]


def test_replicas_on_ray() -> None:
    found = record("ray_serving_cpu.json")
    assert table(PAGE, "routing") == [
        ["random", f"{100 * found['random']['resident_share']:.0f}%"],
        ["by chunk", f"{100 * found['chunks']['resident_share']:.0f}%"],
    ]
    assert found["ratio"] >= 1.5
    assert found["random"]["kinds"] == found["chunks"]["kinds"] == {"answered": found["trace"]["questions"]}
    assert found["equal_answers"]["equal"] == found["equal_answers"]["asked"]
    outcomes = found["killed"]["outcomes"]
    # A stream that had begun is all that a killed replica may cost.
    assert set(outcomes) <= {"streamed: answered", "whole: answered", "streamed: error event: replica_lost"}
    assert outcomes["whole: answered"] == found["killed"]["requests"] / 2


def test_simulated_replicas() -> None:
    found: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in record("simulation_replicas.json")["replicas"]:
        found.setdefault(row["replicas"], {})[row["trace"], row["routing"]] = row
    want = []
    for count, rows in found.items():
        random, chunks = rows["sections", "random"], rows["sections", "chunks"]
        shares = [f"{100 * one['resident']:.0f}%" for one in (random, chunks)]
        ttft_s = [f"{one['ttft_mean_s']:.3f} s" for one in (random, chunks)]
        # The largest count was simulated with sections only.
        others = [
            f"{100 * rows['independent', how]['resident']:.0f}%" if ("independent", how) in rows else "-"
            for how in ("random", "chunks")
        ]
        want.append([str(count), *shares, *ttft_s, f"{chunks['busiest_over_mean']:.1f}", *others])
    assert table(PAGE, "replicas") == want
    assert list(found) == [1, 2, 4, 8, 16, 32, 64]
