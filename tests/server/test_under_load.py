"""Signals in the midst of load: no answer that has begun is lost, and no store is damaged."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from models import smollm2_tokenizer, tiny_model
from server_load import Bench, sigkill, sigterm

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder, model = tmp_path_factory.mktemp("load"), tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(model)
    smollm2_tokenizer().save_pretrained(model)
    options = json.dumps({"preprocessing": "none", "trust_probe": True, "max_num_seqs": 4})
    args = {"documents": 3, "chunks": 3, "max_tokens": 200, "before_signal": 3.0}
    return Bench(Namespace(model=str(model), engine_options=options, **args), Path(folder))


def test_a_server_that_is_told_to_end_loses_no_answer(bench: Bench) -> None:
    found = sigterm(bench)
    assert found["answered"] > 0
    assert found["ended_after_the_signal"] > 0
    assert found["refused"] > 0
    lost = ("broken_off", "refused_without_retry_after", "no_connection_before_the_signal")
    assert [found[name] for name in lost] == [0, 0, 0]
    assert found["seconds_to_end"] < 60


def test_a_server_that_is_killed_leaves_no_damage(bench: Bench) -> None:
    found = sigkill(bench)
    assert found["damage"] == [], found
    assert (found["check_exit_status"], found["answered_by_the_next_server"]) == (0, "answered"), found
    assert found["jobs_interrupted"] > 0
