"""Constrained decoding: whatever a model prefers to write, the answer is valid and complete."""

from __future__ import annotations

import importlib
import json
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.decoding import end_token_ids, json_constraint
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import LoadedModel, load_model

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"label": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["label", "kids"],
        }
    },
    "$ref": "#/$defs/node",
}


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def schema(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
        required = [name for name in properties if name not in optional]
        return {"type": "object", "properties": properties, "required": required}

    names = st.sampled_from(["name", "x", "passengers", "Länge"])
    return st.builds(schema, st.dictionaries(names, values, min_size=1, max_size=3), st.sets(names))


PLAIN = st.sampled_from(
    [
        {"type": "string"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "boolean"},
        {"enum": ["red", "green"]},
        {"type": "string", "minLength": 3, "maxLength": 9},
        {"type": "string", "pattern": r"^\d{4}-\d{2}$"},
        {"anyOf": [{"type": "number"}, {"type": "null"}]},
    ]
)
SCHEMAS = objects(
    st.recursive(
        PLAIN,
        lambda inner: st.builds(lambda items: {"type": "array", "items": items}, inner) | objects(inner),
        max_leaves=4,
    )
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("smollm2-135m")


class RandomModel:
    """Writes tokens of random liking under a constraint."""

    def __init__(self, loaded: LoadedModel, seed: int) -> None:
        self.loaded = loaded
        self.generator = torch.Generator().manual_seed(seed)

    def write(self, schema: Any, max_tokens: int) -> tuple[str, list[int], bool]:
        constraint = json_constraint(self.loaded, schema, max_tokens=max_tokens)
        ids: list[int] = []
        for _ in range(max_tokens):
            logits = 3 * torch.randn(self.loaded.model.config.vocab_size, generator=self.generator)
            token = int(constraint(ids, logits).argmax())
            if token in end_token_ids(self.loaded):
                break
            ids.append(token)
        return self.loaded.tokenizer.decode(ids), ids, constraint.shortened


@settings(max_examples=25)
@given(SCHEMAS | st.just(TREE), st.integers(0, 24), st.integers(0, 2**31))
def test_answers_are_valid_and_complete(loaded: LoadedModel, schema: Any, spare: int, seed: int) -> None:
    constraint = json_constraint(loaded, schema, max_tokens=1)
    needed = constraint._tokens_to_end(constraint._matcher, loaded.model.config.vocab_size)
    text, ids, _ = RandomModel(loaded, seed).write(schema, needed + spare)
    jsonschema.validate(json.loads(text), schema)
    assert len(ids) <= needed + spare


def test_the_room_is_used_and_what_was_left_out_is_told(loaded: LoadedModel) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    text, ids, shortened = RandomModel(loaded, 1).write(schema, 64)
    assert len(json.loads(text)["text"]) > 100
    assert (len(ids), shortened) == (64, True)
    assert RandomModel(loaded, 1).write({"enum": ["Mizar", "Vega"]}, 64)[2] is False


def test_any_object(loaded: LoadedModel) -> None:
    for max_tokens in (2, 3, 20):
        assert isinstance(json.loads(RandomModel(loaded, 3).write(None, max_tokens)[0]), dict)


def test_objects_are_written_as_models_have_read_them(loaded: LoadedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [2, 3]}}, "required": ["a", "b"]}
    assert RandomModel(loaded, 0).write(schema, 40)[0] == json.dumps({"a": 1, "b": [2, 3]})


@pytest.mark.parametrize("schema", [{"type": "colour"}, {"type": "object", "minProperties": -1}])
def test_a_schema_that_is_none_is_refused(loaded: LoadedModel, schema: Any) -> None:
    with pytest.raises(ConfigError, match="schema cannot be used"):
        json_constraint(loaded, schema, max_tokens=8)


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 10_000}, {"type": "array", "minItems": 10_000}])
def test_what_cannot_be_completed_is_not_searched_for_an_ending_again_and_again(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, schema: Any
) -> None:
    """Every request waits meanwhile."""
    looks, module = list[int](), importlib.import_module("fused_kv_llm.decoding.json_constraint")
    run = module._allowed

    def counted(matcher: Any, vocabulary: int) -> torch.Tensor:
        looks.append(1)
        return run(matcher, vocabulary)

    monkeypatch.setattr(module, "_allowed", counted)
    constraint, ids = json_constraint(loaded, schema, max_tokens=60), list[int]()
    for _ in range(60):
        ids.append(int(constraint(ids, torch.randn(loaded.model.config.vocab_size)).argmax()))
    assert constraint.shortened
    # One for each token, and one search.
    assert len(looks) <= 60 + 61
