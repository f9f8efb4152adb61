"""Figures in docs/store.md are those of the records."""

from __future__ import annotations

from .records import prose, record, table

PAGE = "docs/store.md"


def test_storage_dtypes() -> None:
    want = []
    for row in record("compression_cpu.json")["rows"]:
        low, high = row["kl_over_float32_0.15_95"]
        ratio = f"{row['kl_over_float32_0.15']:.3f} ({low:.3f} to {high:.3f})" if high > 1.0005 else "1"
        loads = [f"{row[name]:.1f} us" for name in ("warm_us_per_token", "cold_us_per_token")]
        firsts = [f"{1000 * row[name]:.0f} ms" for name in ("ttft_0_s", "ttft_0.15_s")]
        losses = [f"{row[name]:.4f}" for name in ("kl_0", "kl_0.15")]
        want.append([row["storage"], f"{row['bytes_per_token']:,}", *loads, *firsts, *losses, ratio])
    assert table(PAGE, "storage") == want


def test_eviction() -> None:
    found = record("eviction.json")
    at = [found["budgets"].index(budget) for budget in (0.05, 0.2, 0.4)]

    def saved(rows: list[dict[str, float]]) -> str:
        shares = [100 * rows[budget]["saved"] for budget in at]
        return ", ".join(f"{share:.1f}" if share < 2 else f"{share:.0f}" for share in shares) + "%"

    # Nothing is asked for twice in HotpotQA's order.
    traces = {name: result for name, result in found["traces"].items() if not name.startswith("hotpotqa")}
    policies = ("lru", "lfu", "gdsf", "pgdsf", "look-ahead")
    want = {f"{where}, {name}": [saved(result[key][policy]) for policy in policies]
            for where, key in (("store", "chunks"), ("tree", "tree")) for name, result in traces.items()}  # fmt: skip
    rows = table(PAGE, "trace")
    assert len(rows) == 9
    assert {row[0]: row[1:] for row in rows} == {row[0]: want[row[0]] for row in rows}


def test_the_store() -> None:
    found = record("store_cpu.json")
    get, index = found["get"], found["index"]
    assert [row[1] for row in table(PAGE, "what")] == [
        f"{found['put']['put_over_write_fsync']:.2f}",
        f"{get['memory_hit_us']:.0f} us; {get['open_file_us']:.0f} us",
        f"{index['by_key_ms']:.1f} ms, {index['index_mb']:.1f} MB",
        f"{index['by_text_ms']:.1f} ms, {index['content_index_mb']:.0f} MB",
    ]
    text = prose(PAGE)
    assert f"is read in {index['content_index_loading_s']:.1f} s" in text
