"""What is known of a request from its body: chunks wherever they stand, conversations, and nothing of nonsense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from corpus import SHORT

from fused_kv_llm.prompt import content_hash
from fused_kv_llm.scale.chunk_names import chunk_name, conversation_names
from fused_kv_llm.scale.placement import Held, Part, Placement
from fused_kv_llm.scale.routing_keys import RoutingKeys, StoredHashes


def hashes_of(texts: list[str]) -> StoredHashes:
    found = [content_hash(text) for text in texts]
    return (
        np.array([one.prefix for one in found], np.uint64),
        np.array([one.full for one in found], np.uint64),
        np.array([one.length for one in found], np.int64),
    )


def chat(*texts: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


@pytest.fixture
def keys() -> RoutingKeys:
    made = RoutingKeys()
    made.add(hashes_of(SHORT[:6]))
    return made


def names_of(texts: list[str], tenant: str = "") -> list[Part]:
    return [Part(chunk_name(content_hash(text).full, tenant), len(text)) for text in texts]


@pytest.mark.parametrize("between", ["\n\n", " ", "\n---\nPassage 7: ", "</doc><doc>"])
def test_chunks_are_found_wherever_they_stand(keys: RoutingKeys, between: str) -> None:
    prompt = between.join(["Answer.", SHORT[4], SHORT[1], SHORT[7], "Where?"])
    key = keys.key_of(chat(prompt), "")
    assert list(key.chunks) == names_of([SHORT[4], SHORT[1]])
    assert key.size == len(prompt)


def test_parts_of_a_message_and_completions_are_read_too(keys: RoutingKeys) -> None:
    parts = [{"type": "text", "text": f"{SHORT[2]}\n"}, {"type": "text", "text": SHORT[3]}]
    assert list(keys.key_of({"messages": [{"role": "user", "content": parts}]}, "").chunks) == names_of(SHORT[2:4])
    assert list(keys.key_of({"prompt": [SHORT[0], SHORT[5]]}, "").chunks) == names_of([SHORT[0], SHORT[5]])


def test_tenants_have_names_of_their_own(keys: RoutingKeys) -> None:
    asked = chat(SHORT[0])
    a, b = keys.key_of(asked, "a"), keys.key_of(asked, "b")
    assert list(a.chunks) == names_of([SHORT[0]], "a")
    assert not {part.key for part in (*a.chunks, *a.prefixes)} & {part.key for part in (*b.chunks, *b.prefixes)}


def test_what_two_replicas_tell_of_is_known_once(keys: RoutingKeys) -> None:
    keys.add(hashes_of(SHORT[:6]))
    assert list(keys.key_of(chat(SHORT[0]), "").chunks) == names_of([SHORT[0]])
    assert len(keys) == 6


@pytest.mark.parametrize(
    "request_",
    [{}, {"messages": None}, {"messages": [1, {"content": 3}]}, {"prompt": 7}, {"messages": [{"content": [{"x": 1}]}]}],
)
def test_nonsense_has_no_parts(keys: RoutingKeys, request_: dict[str, Any]) -> None:
    key = keys.key_of(request_, "")
    assert (key.size, key.chunks) == (0, ())


def test_a_next_turn_has_the_last_prompt_among_its_prefixes(keys: RoutingKeys) -> None:
    first, second = keys.key_of(chat("Hello"), ""), keys.key_of(chat("Hello", "Hi", "And now?"), "")
    assert first.prefixes[0] in second.prefixes[1:]
    placement = Placement()
    placement.update("b", Held(prefixes=frozenset({first.prefixes[0].key})))
    assert placement.rank(second, {"a": 0.0, "b": 0.0})[0] == "b"


def test_a_system_message_is_no_conversation(keys: RoutingKeys) -> None:
    def asked(question: str) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]}

    one, other = keys.key_of(asked("a"), ""), keys.key_of(asked("b"), "")
    assert not {part.key for part in one.prefixes} & {part.key for part in other.prefixes}


def test_names_of_conversations_depend_on_where_messages_end() -> None:
    assert (
        conversation_names([("user", "ab"), ("user", "c")], "")[-1]
        != conversation_names([("user", "a"), ("user", "bc")], "")[-1]
    )
