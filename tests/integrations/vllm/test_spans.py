"""What a span's key depends on: all tokens up to its end, and everything that its KV depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from integrations.vllm.requests import PROMPT, SPAN, identity, spans

LAYOUT = identity().layout


def keys(*arguments: Any, **changes: Any) -> list[str]:
    return [span.key for span in spans(*arguments, **changes)]


def test_a_prompt_is_cut_into_whole_spans() -> None:
    found = spans()
    assert [(span.start, span.stop) for span in found] == [(0, SPAN), (SPAN, 2 * SPAN), (2 * SPAN, 3 * SPAN)]
    assert [token for span in found for token in span.token_ids] == PROMPT[: 3 * SPAN]
    assert spans(PROMPT[: SPAN - 1]) == []
    assert len(spans(PROMPT[:SPAN])) == 1


def test_a_longer_prompt_has_the_same_keys_at_its_beginning() -> None:
    assert keys(PROMPT + PROMPT)[:3] == keys(PROMPT)


@pytest.mark.parametrize("changed", [0, SPAN - 1, SPAN, 3 * SPAN - 1])
def test_a_token_changes_the_keys_of_its_span_and_of_all_behind_it(changed: int) -> None:
    other = list(PROMPT)
    other[changed] += 1
    are_same = [one == two for one, two in zip(keys(PROMPT), keys(other), strict=True)]
    assert are_same == [number < changed // SPAN for number in range(3)]


def test_the_same_tokens_at_another_place_have_another_key() -> None:
    assert len(set(keys(PROMPT[:SPAN] * 3))) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "1" * 32},
        {"dtype": "float16"},
        {"computed_by": "0.33.0, None"},
        {"computed_by": "0.32.0, awq"},
        {"settings": {"hidden_size": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"settings": {"hidden_size": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}},
        {"settings": {"hidden_size": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0}}},
        {"layout": replace(LAYOUT, backend="FLASH_ATTN")},
        {"layout": replace(LAYOUT, dtype="float16")},
        {"layout": replace(LAYOUT, block_tokens=16)},
        {"layout": replace(LAYOUT, heads=1)},
        {"epoch": "1"},
    ],
)
def test_whatever_kv_depends_on_changes_every_key(changes: Mapping[str, Any]) -> None:
    assert set(keys()).isdisjoint(keys(**changes))


def test_tenants_share_nothing() -> None:
    found = [keys(salt=salt) for salt in (None, "alice", "bob")]
    assert len({key for one in found for key in one}) == 9
    assert keys(salt="alice") == keys(salt="alice")


def test_the_cut_is_a_part_of_the_key() -> None:
    from fused_kv_vllm.spans import prefix_spans

    assert prefix_spans("a", PROMPT, 8)[1].key != prefix_spans("a", PROMPT, 16)[0].key


@pytest.mark.parametrize(
    ("settings", "depends"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, False),
        ({"rope_scaling": None, "rope_theta": 10000.0}, False),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, True),
        ({"rope_scaling": {"type": "su"}}, True),
    ],
)
def test_the_longest_prompt_counts_where_the_rotation_depends_on_it(settings: Any, depends: bool) -> None:
    short, long = (identity(settings=settings, max_model_len=length).of_tenant(None) for length in (4096, 131072))
    assert (short.digest != long.digest) is depends


def test_what_says_nothing_of_a_forward_changes_nothing() -> None:
    about = {"transformers_version": "5.19.0", "_name_or_path": "/here", "eos_token_id": 2}
    assert identity(settings=identity().settings | about).of_tenant(None) == identity().of_tenant(None)


def test_an_engines_identity_is_never_that_of_spans() -> None:
    assert identity().of_tenant(None).preprocessing.startswith("vllm-blocks ")


def test_new_weights_have_an_identity_of_their_own() -> None:
    first = identity()
    second, third = first.with_new_weights(), first.with_new_weights()
    assert len({one.of_tenant(None).digest for one in (first, second, third)}) == 3
