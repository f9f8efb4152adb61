"""The trace of a prompt as plain data."""

from __future__ import annotations

import json

import numpy as np

from fused_kv_llm.report import PromptTrace


def test_as_plain_data() -> None:
    offsets = np.array([[0, 2], [2, 5], [5, 6], [6, 9]])
    trace = PromptTrace("ab cd.efg", offsets, np.array([-2, 0, 0, -1]), np.array([2]))
    plain = json.loads(json.dumps(trace.to_dict()))
    assert plain["text"] == "ab cd.efg"
    assert plain["tokens"] == offsets.tolist()
    assert plain["states"] == [0, 1, 2, 3]
    # The prefix is outside chunks as fresh text is.
    assert plain["chunk"] == [-1, 0, 0, -1]
