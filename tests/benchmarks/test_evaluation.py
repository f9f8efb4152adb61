"""The quality benchmark's rooms: metrics by hand-made cases, records that survive a crash, summaries."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus import SHORT
from evaluation.articles import join_articles
from evaluation.comparison import against_default, holm, paired_p
from evaluation.measure import measure
from evaluation.methods import BASELINE, FULL, Method, methods_of
from evaluation.metrics import answer_scores, f1, normalise, recall, rouge_l
from evaluation.questions import Question, read_corpus, read_questions
from evaluation.records import RecordFile, read_records
from evaluation.ruler import TASKS, Task, make_ruler
from evaluation.setting import Setting
from evaluation.summary import bootstrap, geometric_mean_ratio, markdown_table, rank_correlation, summarise
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.report import lexical_support


def test_squad_normalisation() -> None:
    assert normalise("  The U.S. dollar, an\tANSWER! ") == "us dollar answer"
    assert f1("the Eiffel Tower", "Eiffel tower.") == 1.0
    assert f1("Paris in France", "Paris") == pytest.approx(2 * 1 / 4)
    assert f1("", "Paris") == 0.0


def test_rouge_l_is_the_longest_common_subsequence() -> None:
    # "cat sat mat" is common, in order, of 5 and 4 words.
    assert rouge_l("cat sat on red mat", "cat quickly sat mat") == pytest.approx(2 * 3 / 9)
    assert rouge_l("mat sat cat", "cat sat mat") == pytest.approx(2 * 1 / 6)


def test_answer_scores_take_the_best_answer_and_whole_words() -> None:
    scores = answer_scores("It was October 1973.", ["1973", "October 1973"], "October 1973")
    assert scores["f1"] == pytest.approx(2 * 2 / 6)
    assert (scores["em"], scores["contains"], scores["answer_recall"]) == (0.0, 1.0, 1.0)
    assert answer_scores("novel", ["no"], "no")["contains"] == 0.0


def test_recall_is_the_share_of_wanted_positions() -> None:
    assert recall([2, 3], [2, 5, 6]) == pytest.approx(1 / 3)
    assert recall([2], []) is None


def test_bootstrap_pairs_questions() -> None:
    base = list(np.random.default_rng(1).uniform(1, 9, 40))
    low, high = bootstrap([value / 4 for value in base], base, "recovered")
    assert low == pytest.approx(0.75)
    assert high == pytest.approx(0.75)
    low, high = bootstrap([0.0, 1.0] * 50, [0.0] * 100, "mean")
    assert 0.35 < low < 0.45
    assert 0.55 < high < 0.65


def test_rank_correlation_shares_ranks_among_equal_values() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 4, 9, 100]) == pytest.approx(1.0)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: 1.5 / sqrt(1.5 * 2).
    assert rank_correlation([5, 5, 7], [1, 2, 3]) == pytest.approx(1.5 / np.sqrt(3.0))
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_p_values_tell_a_difference_from_noise_and_are_corrected() -> None:
    noise = np.random.default_rng(2).normal(0.0, 1.0, (60, 20))
    shifted = noise.copy()
    shifted[:, 0] += 1.0
    p_values = paired_p(shifted)
    assert p_values[0] < 0.001
    assert (p_values[1:] < 0.05).sum() <= 3
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])


def test_rules_are_compared_with_the_default_beside_them() -> None:
    default, rule, other = (Method(name, "none", 0.15) for name in ("sink_attention", "random", "fusionrag"))
    alone = Method("random", "similar", 0.15)
    draws = np.random.default_rng(4).uniform(0.5, 1.5, 12)
    worse = [{"kl": 2 * value, "contains": None} for value in draws]
    columns = {default: [{"kl": value} for value in draws], rule: worse, other: [{"kl": v} for v in draws[::-1]]}
    found = against_default({**columns, alone: worse})
    assert set(found) == {rule, other}
    assert set(found[rule]) == {"kl"}
    assert found[rule]["kl"]["difference"] == pytest.approx(draws.mean())
    assert found[rule]["kl"]["p_holm"] == pytest.approx(2 * found[rule]["kl"]["p"])
    assert found[rule]["kl"]["p_holm"] < 0.001
    assert found[other]["kl"]["p_holm"] > 0.2
    assert against_default({method: records[:9] for method, records in columns.items()}) == {}


def test_methods_share_one_full_reuse_at_ratio_zero() -> None:
    methods = methods_of(["random", "full_reuse"], ["none", "similar"], [0.0, 0.15])
    assert [m.key for m in methods] == [
        "full_reuse/none/0", "random/none/0.15", "full_reuse/similar/0", "random/similar/0.15",
    ]  # fmt: skip
    assert all(Method.from_key(m.key) == m for m in methods)


def test_records_of_all_parts_are_read_and_a_cut_line_is_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "quality.json"
    RecordFile(out, "d", (0, 2)).append("q0", {"a/none/0": {"kl": 1.0}})
    RecordFile(out, "d", (1, 2)).append("q1", {"a/none/0": {"kl": 2.0}})
    RecordFile(out, "other", (1, 2)).append("q2", {"a/none/0": {"kl": 3.0}})
    part = tmp_path / "quality.records.1of2.jsonl"
    part.write_text(part.read_text() + '{"settings": "d", "quest')
    assert set(read_records(out, "d")) == {("q0", "a/none/0"), ("q1", "a/none/0")}
    RecordFile(out, "d", (1, 2)).append("q3", {"a/none/0": {"kl": 4.0}})
    assert set(read_records(out, "d")) == {("q0", "a/none/0"), ("q1", "a/none/0"), ("q3", "a/none/0")}


def _write_set(path: Path) -> None:
    passages = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(SHORT[:4])]
    lines = [
        {"id": f"q{i}", "question": "How many?", "answers": ["many of them"], "passages": passages,
         "gold_passage_ids": ["3"]}
        for i in range(3)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))


def test_questions_hold_the_gold_passage_and_keep_their_order(tmp_path: Path) -> None:
    _write_set(tmp_path / "set.jsonl")
    few, all_of_them = (read_questions(tmp_path / "set.jsonl", count, 2) for count in (1, 0))
    assert len(few) == 1
    assert len(all_of_them) == 3
    assert few[0] == all_of_them[0]
    assert SHORT[3] in few[0].passages
    assert read_corpus(tmp_path / "set.jsonl") == SHORT[:4]


def test_a_third_of_the_questions_is_held_back_and_parts_share_no_prompt(tmp_path: Path) -> None:
    line = {"question": "Why?", "answers": ["so"], "passages": [], "gold_passage_ids": []}
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps({"id": f"q{i}", **line}) for i in range(300)))
    held, dev = (read_questions(tmp_path / "set.jsonl", 0, 5, part=part) for part in ("held", "dev"))
    assert 70 < len(held) < 130
    assert {q.id for q in held}.isdisjoint(q.id for q in dev)
    assert len(held) + len(dev) == 300
    assert read_questions(tmp_path / "set.jsonl", 7, 5, part="held") == held[:7]


def test_passages_of_one_article_are_joined_to_about_so_many_tokens(tmp_path: Path) -> None:
    passages = [
        {"id": f"{title}{i}", "title": title, "text": f"{title}{i} " + "word " * (words - 1)}
        for title, sizes in {"b": (40, 40, 40), "a": (40, 90, 200), "": (10, 10)}.items()
        for i, words in enumerate(sizes)
    ]
    record = {"id": "q", "question": "?", "answers": ["x"], "passages": passages[::-1], "gold_passage_ids": ["b2"]}
    (tmp_path / "set.jsonl").write_text(json.dumps(record))
    chunks = join_articles(tmp_path / "set.jsonl", 100, lambda text: len(text.split()))
    groups = {tuple(part.split()[0] for part in chunk.split("\n\n")) for chunk in chunks.values()}
    # 40 and half of 90 lie within 100, and so do 80 and half of 40; what has no title is not joined.
    assert groups == {("b0", "b1", "b2"), ("a0", "a1"), ("a2",), ("0",), ("1",)}
    question = read_questions(tmp_path / "set.jsonl", 1, 2, chunks=chunks)[0]
    assert chunks["b2"] in question.passages
    assert len(set(question.passages)) == 2


@pytest.mark.parametrize("task", TASKS)
def test_ruler_hides_what_it_asks_for(task: Task) -> None:
    questions = make_ruler(task, 3, words=300, passages=5, needles=4, seed=1)
    assert questions == make_ruler(task, 3, words=300, passages=5, needles=4, seed=1)
    assert questions != make_ruler(task, 3, words=300, passages=5, needles=4, seed=2)
    for question in questions:
        texts = [p["text"] for p in question["passages"]]
        context = " ".join(texts)
        assert len(texts) == 5
        assert 300 <= len(context.split()) < 420
        assert len(set(question["answers"])) == 4
        assert all(answer in context for answer in question["answers"])
        gold = {p["id"] for p in question["passages"] if any(a in p["text"] for a in question["answers"])}
        assert gold <= set(question["gold_passage_ids"])
        if task == "variable_tracking":
            order = [context.index(f"VAR {name} =") for name in question["answers"]]
            assert order == sorted(order)
            value = question["question"].split("value ")[1].split(",")[0]
            assert f"VAR {question['answers'][0]} = {value}." in context


def test_measuring_and_summing_up(tmp_path: Path) -> None:
    questions = [Question(f"q{i}", "How many?", ("many of them",), tuple(SHORT[i : i + 3])) for i in range(3)]
    methods = methods_of(["random"], ["none"], [0.5])
    records = {}
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, store_misses=False) as engine:
        engine.build_kv_cache(SHORT[:6], progress=False)
        for question in questions:
            measured = measure({"none": engine}, question, methods, Setting(answer_tokens=4, recall=True))
            records.update({(question.id, method.key): record for method, record in measured.items()})
        gold = engine.token_ids("many of them")
        forced, _ = engine.prefill(questions[0].prompt("plain"), recompute_ratio=1.0, max_tokens=len(gold) + 1)
        chances = [forced.logits.log_softmax(-1)[gold[0]]]
        for token, following in pairwise(gold):
            chances.append(forced.append(engine.loaded, [token])[-1].log_softmax(-1)[following])
        forced.cache.release()
        plain = engine.generate(questions[0].prompt("plain"), recompute_ratio=1.0, max_tokens=4).text
    assert all(record["chunks_found"] == 3 for record in records.values())
    rows = {row["selector"]: row for row in summarise(records, ["q0", "q1", "q2"])}
    assert rows["full_prefill"]["kl"] == 0.0
    assert rows["full_prefill"]["recovered"] == 1.0
    assert rows["full_reuse"]["kl"] > rows["random"]["kl"] > 0
    assert rows["random"]["recovered"] == pytest.approx(1 - rows["random"]["kl"] / rows["full_reuse"]["kl"])
    share = geometric_mean_ratio(*(_kl(records, key) for key in ("random/none/0.5", BASELINE.key)))
    assert rows["random"]["recovered_typical"] == pytest.approx(1 - share)
    # The gold answer's rows were overwritten: generating is unaffected by having scored it.
    assert records["q0", FULL.key]["answer"] == plain.strip().splitlines()[0].strip()
    assert records["q0", BASELINE.key]["recomputed_tokens"] == 0
    by_steps = float(torch.stack(chances).mean().exp())
    assert records["q0", FULL.key]["gold_probability"] == pytest.approx(by_steps, rel=1e-4)
    assert records["q0", "random/none/0.5"]["selection_bytes"] == 0
    for (name, _), record in records.items():
        passages = next(question.passages for question in questions if question.id == name)
        assert record["support"] == lexical_support(record["answer"], passages).share
    worst = max(records[f"q{i}", BASELINE.key]["kl"] for i in range(3))
    assert rows["full_reuse"]["kl"] < rows["full_reuse"]["kl_p95"] <= worst
    expected = {pair: {**record, "expected_divergence": 2 * record["kl"]} for pair, record in records.items()}
    by_rank = {row["selector"]: row.get("expected_rank_correlation") for row in summarise(expected, ["q0", "q1", "q2"])}
    assert by_rank == {"full_prefill": None, "full_reuse": pytest.approx(1.0), "random": pytest.approx(1.0)}
    assert "| random | none | 0.5 |" in markdown_table(list(rows.values()))


def _kl(records: dict[tuple[str, str], dict[str, Any]], key: str) -> list[float]:
    return [record["kl"] for (_, name), record in records.items() if name == key]


def test_one_bad_question_does_not_decide_a_geometric_mean() -> None:
    assert geometric_mean_ratio([1.0, 4.0], [2.0, 2.0]) == pytest.approx(1.0)
    assert geometric_mean_ratio([0.01] * 9 + [1.0], [0.1] * 10) == pytest.approx(0.1 * 100**0.1)
    assert geometric_mean_ratio([0.0], [0.1]) == pytest.approx(1e-4)


@pytest.mark.parametrize("options", [{"needles": 1}, {"needles": 13}, {"words": 20}, {"words": 100, "passages": 50}])
def test_ruler_says_what_it_cannot_make(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"outside 2 to 12|Give more words"):
        make_ruler("multi_query", 1, **options)
