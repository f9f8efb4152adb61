from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.prompt.cover import best_cover

SPANS = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8)), max_size=8).map(
    lambda pairs: [(start, start + length) for start, length in pairs]
)


def disjoint(spans: list[tuple[int, int]]) -> bool:
    return all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(spans, 2))


def best_by_trying(spans: list[tuple[int, int]]) -> tuple[int, int]:
    subsets = [chosen for size in range(len(spans) + 1) for chosen in combinations(spans, size)]
    return max((sum(e - s for s, e in chosen), -len(chosen)) for chosen in subsets if disjoint(list(chosen)))


@given(SPANS)
def test_covers_as_much_as_possible_with_as_few_spans_as_possible(spans: list[tuple[int, int]]) -> None:
    chosen = [spans[i] for i in best_cover(spans)]
    assert disjoint(chosen)
    assert chosen == sorted(chosen)
    assert (sum(end - start for start, end in chosen), -len(chosen)) == best_by_trying(spans)
