"""KV that requests leave to later ones: what is computed again, and that answers are what they are without it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from torch import Tensor
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.context_shift import place_weight
from fused_kv_llm.errors import ConfigError, ModelChangedError, RequestCancelledError
from fused_kv_llm.kv import PrefixRun
from fused_kv_llm.online import Generation, fusion
from fused_kv_llm.online.variant_choice import describe_variants
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import means

CHUNKS, QUESTIONS = SHORT[:4], ("How many passengers can she carry?", "Who owns the ferries?")


def make_engine(folder: Path, model: Any = None, **options: Any) -> FusedKVEngine:
    options = {"preprocessing": "none", "store_misses": False, "dtype": "float32", "recompute_ratio": 0.3,
               "prefix_cache_bytes": None, **options}  # fmt: skip
    engine = FusedKVEngine(model or tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)
    engine.build_kv_cache(CHUNKS, preprocess="wait", progress=False)
    return engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FusedKVEngine]:
    with make_engine(tmp_path) as made:
        yield made


@pytest.fixture
def without(tmp_path: Path) -> Iterator[FusedKVEngine]:
    """An engine over the same store that keeps nothing."""
    with make_engine(tmp_path, prefix_cache_bytes=0) as made:
        yield made


def ask(engine: FusedKVEngine, prompt: Any, **options: Any) -> tuple[Generation, Tensor]:
    """Return an answer and the logits of its tokens, ``[tokens, vocabulary]``."""
    seen = list[Tensor]()

    def note(ids: Any, logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits

    answer = engine.generate(prompt, constraint=note, **{"max_tokens": 8, **options})
    return answer, torch.stack(seen)


def conversation(first: str, answer: str, second: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": second},
    ]


def common(one: list[int], other: list[int]) -> int:
    """Return how many first tokens are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def fused_runs(engine: FusedKVEngine, prompt: Any, **options: Any) -> list[PrefixRun]:
    """Return what the tree has for a prompt."""
    recipe = engine.requests
    found = list[list[PrefixRun]]()
    plan = recipe.planner.plan

    def noting(*args: Any, **options: Any) -> Any:
        request = plan(*args, **options)
        found.append(request.known_runs)
        return request

    recipe.planner.plan = noting  # type: ignore[method-assign]
    try:
        engine.generate(prompt, max_tokens=1, **options)
    finally:
        del recipe.planner.plan
    return found[0]


@pytest.mark.parametrize("options", [{"recompute_ratio": 1.0}, {"recompute_ratio": 0.3}, {"recompute_ratio": 0.0},
                                     {"selector": "cacheblend"}, {"selector": "boundary"}])  # fmt: skip
def test_the_same_prompt_again_computes_one_row(engine: FusedKVEngine, options: dict[str, Any]) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    first, want = ask(engine, prompt, **options)
    again, got = ask(engine, prompt, **options)
    assert first.report.computed_tokens > 1
    assert (again.report.computed_tokens, again.report.prefix_tokens) == (1, again.report.prompt_tokens - 1)
    assert first.report.prefix_cache_tokens == 0 < again.report.prefix_cache_tokens
    assert again.report.chunks_found == first.report.chunks_found == len(CHUNKS)
    assert not again.report.bytes_loaded
    assert again.token_ids == first.token_ids
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("selector", ["boundary", "cache_craft_online"])
def test_a_chunk_of_the_second_turn_is_not_the_prompts_first(engine: FusedKVEngine, selector: str) -> None:
    """EPIC and Cache-Craft recompute nothing of the first chunk, which stands in the KV of the first turn here."""
    answer, _ = ask(engine, rag_prompt(CHUNKS[:1], QUESTIONS[0]), selector=selector)
    assert answer.report.recomputed_tokens == 0
    later = conversation(rag_prompt(CHUNKS[:1], QUESTIONS[0]), answer.text, f"{CHUNKS[1]}\n\n{QUESTIONS[1]}")
    report = ask(engine, later, selector=selector)[0].report
    assert report.prefix_cache_tokens > 0
    assert report.chunks_found == 2
    assert report.recomputed_tokens > 0


def test_a_chunk_behind_one_that_the_store_has_lost_is_not_the_prompts_first(engine: FusedKVEngine) -> None:
    answer, _ = ask(engine, rag_prompt(CHUNKS[:1], QUESTIONS[0]), selector="boundary")
    later = conversation(rag_prompt(CHUNKS[:1], QUESTIONS[0]), answer.text, f"{CHUNKS[1]}\n\n{QUESTIONS[1]}")
    engine.store.delete([key for key in engine.corpus.keys_of(CHUNKS[:1]) if key])
    report = ask(engine, later, selector="boundary")[0].report
    assert report.prefix_cache_tokens > 0
    assert report.chunks_found == 1
    assert report.recomputed_tokens > 0


@pytest.mark.parametrize(("chunk", "into", "is_exact", "is_first"), [
    (0, -4, True, True), (0, -4, False, False), (0, 5, False, True), (0, 5, True, True),
    (1, -1, False, False), (1, 5, False, False), (1, 5, True, False),
])  # fmt: skip
def test_which_chunk_behind_a_prefix_is_the_prompts_first(
    engine: FusedKVEngine, chunk: int, into: int, is_exact: bool, is_first: bool
) -> None:
    """A prefix that ends so many tokens inside a chunk, or before it: fused KV before a whole chunk is of another."""
    plan, prompt = engine.requests.planner.plan, rag_prompt(CHUNKS[:2], QUESTIONS[0])
    with plan(prompt, FusionReport()) as whole:
        assert whole.has_first_chunk
        known = whole.chunks[chunk].segment.start + into
    match = SimpleNamespace(num_tokens=known, version=0, is_exact=is_exact, release=lambda: None)
    with plan(prompt, FusionReport(), find_prefix=lambda *_: match) as request:
        assert len(request.chunks) == 2 - chunk
        assert request.has_first_chunk == is_first
        assert float(describe_variants(request, 1.0)[0][0]) == (0.0 if is_first else 0.5)


@pytest.mark.parametrize("second", [QUESTIONS[1], f"And this?\n\n{CHUNKS[3]}\n\n{QUESTIONS[1]}"])
@pytest.mark.parametrize("seed", range(3))
def test_at_ratio_one_a_second_turn_is_that_of_a_full_prefill(
    engine: FusedKVEngine, without: FusedKVEngine, second: str, seed: int
) -> None:
    first = rag_prompt(CHUNKS[seed:3], QUESTIONS[0])
    answer, _ = ask(engine, first, recompute_ratio=1.0)
    turn = conversation(first, answer.text, second)
    got, logits = ask(engine, turn, recompute_ratio=1.0)
    want, wanted = ask(without, turn, recompute_ratio=1.0)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert got.token_ids == want.token_ids
    # All that the first turn has computed is there, as far as its text became the same tokens again.
    known = [*engine.encode(first), *answer.token_ids[:-1]]
    assert got.report.prefix_tokens == common(known, engine.encode(turn)) > 100
    assert got.report.prompt_tokens == want.report.prompt_tokens
    assert want.report.prefix_cache_tokens == 0


def test_below_ratio_one_a_second_turn_continues_what_the_first_has_computed(
    engine: FusedKVEngine, without: FusedKVEngine
) -> None:
    first = rag_prompt(CHUNKS[:3], QUESTIONS[0])
    answer, _ = ask(engine, first)
    turn = conversation(first, answer.text, QUESTIONS[1])
    got, logits = ask(engine, turn)
    ids, known = engine.encode(turn), [*engine.encode(first), *answer.token_ids[:-1]]
    kept = common(known, ids)
    assert got.report.prefix_tokens == kept >= len(engine.encode(first))
    assert got.report.computed_tokens == len(ids) - kept
    # The reference: the cache of the first turn, which nobody else has, goes on.
    private, _ = without.prefill(first, max_tokens=500)
    continued = private.append(without.loaded, [*known[len(without.encode(first)) : kept], *ids[kept:]])
    torch.testing.assert_close(logits[0], continued[-1], atol=1e-4, rtol=1e-4)


def test_new_chunks_of_a_second_turn_are_fused_behind_the_first(engine: FusedKVEngine, without: FusedKVEngine) -> None:
    first = rag_prompt(CHUNKS[:2], QUESTIONS[0])
    answer, _ = ask(engine, first)
    turn = conversation(first, answer.text, f"Context:\n{CHUNKS[2]}\n\n{CHUNKS[3]}\n\n{QUESTIONS[1]}")
    report = ask(engine, turn)[0].report
    assert report.chunks_found == 4
    new = sum(len(engine.token_ids(text)) for text in CHUNKS[2:])
    assert 0.9 * new < report.reused_tokens + report.recomputed_tokens <= new
    plain = ask(without, turn)[0].report
    assert plain.reused_tokens + plain.recomputed_tokens > 1.8 * new
    # A third turn has all of both.
    third = [*turn, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert ask(engine, third)[0].report.prefix_tokens >= len(engine.encode(turn)) - 1


def test_another_question_does_not_get_chunks_whose_tokens_its_predecessor_chose(
    engine: FusedKVEngine, without: FusedKVEngine
) -> None:
    one, other = (rag_prompt(CHUNKS, question) for question in QUESTIONS)
    ask(engine, one)
    got, _ = ask(engine, other)
    want, _ = ask(without, other)
    assert got.report.chunks_found == want.report.chunks_found
    assert got.report.reused_tokens == want.report.reused_tokens > 0
    assert got.report.recomputed_tokens == want.report.recomputed_tokens
    # What stands before the chunks is the same for both, and exact.
    assert got.report.prefix_tokens < engine.encode(other).index(engine.token_ids(CHUNKS[0])[3])


@pytest.mark.parametrize("selector", ["boundary", "random", "full_reuse"])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.5])
def test_chunks_that_were_fused_beside_others_are_fused_anew(
    engine: FusedKVEngine, without: FusedKVEngine, selector: str, ratio: float
) -> None:
    """A budget is spent over all chunks of a prompt, also by selectors that ask no question."""
    options = {"selector": selector, "recompute_ratio": ratio}
    ask(engine, f"Read this.\n\n{CHUNKS[0]}\n\nQuestion: Why?", **options)
    prompt = f"Read this.\n\n{CHUNKS[0]}\n\n{CHUNKS[1]}\n\nQuestion: When?"
    got, logits = ask(engine, prompt, **options)
    want, wanted = ask(without, prompt, **options)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert got.token_ids == want.token_ids
    # At ratio 0 the first chunk comes from the tree.
    assert ratio == 0 or got.report.reused_tokens == want.report.reused_tokens > 0


def test_at_ratio_0_chunks_serve_all_questions_one_by_one(engine: FusedKVEngine) -> None:
    options = {"recompute_ratio": 0.0}
    ask(engine, rag_prompt(CHUNKS[:3], QUESTIONS[0]), **options)
    other = ask(engine, rag_prompt(CHUNKS[:3], QUESTIONS[1]), **options)[0].report
    assert other.reused_tokens == 0
    assert other.prefix_cache_tokens > 100
    last = ask(engine, rag_prompt([*CHUNKS[:2], CHUNKS[3]], QUESTIONS[1]), **options)[0].report
    assert 0 < last.reused_tokens <= len(engine.token_ids(CHUNKS[3]))


def test_fused_kv_never_answers_ratio_one_nor_another_recipe(engine: FusedKVEngine, without: FusedKVEngine) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    ask(engine, prompt)
    for options in ({"recompute_ratio": 0.4}, {"selector": "qcfuse"}, {"seed": 3}, {"recompute_ratio": 1.0}):
        got, logits = ask(engine, prompt, **options)
        want, wanted = ask(without, prompt, **options)
        assert got.report.recomputed_tokens == want.report.recomputed_tokens > 0
        if options == {"recompute_ratio": 1.0}:
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        engine.clear_prefix_cache()
        ask(engine, prompt)


def test_at_ratio_one_a_match_may_end_inside_a_chunk(engine: FusedKVEngine, without: FusedKVEngine) -> None:
    ask(engine, f"{CHUNKS[0]}\n\n{CHUNKS[1][:120]} and so on, she says.", recompute_ratio=1.0)
    prompt = f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\n{CHUNKS[2]}\n\n{QUESTIONS[0]}"
    got, logits = ask(engine, prompt, recompute_ratio=1.0)
    inside = len(engine.token_ids(CHUNKS[0])) + len(engine.token_ids(CHUNKS[1][:120])) - 2
    assert got.report.prefix_tokens > inside
    assert got.report.chunks_found == 3
    want, wanted = ask(without, prompt, recompute_ratio=1.0)
    assert got.token_ids == want.token_ids
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def asked_in(template: str, chunks: list[str], question: str) -> list[dict[str, str]]:
    """Return a prompt in which the question stands first, last, or in its own message; all have a system prompt."""
    context = "\n\n".join(chunks)
    last = {"role": "user", "content": f"Question: {question}\n\nContext:\n{context}"}
    if template == "question last":
        last = {"role": "user", "content": f"Read this with care, and all of it.\n\n{context}\n\nQuestion: {question}"}
    elif template == "context in the system prompt":
        return [{"role": "system", "content": f"{SYSTEM}\n\n{context}"}, {"role": "user", "content": question}]
    return [{"role": "system", "content": SYSTEM}, last]


SYSTEM = "You answer for the harbour office. Be short, name the ship, and say so if you do not know something."
TEMPLATES = ("question first", "question last", "context in the system prompt")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"selector": "qcfuse"}, {"selector": "cacheblend"}, {"selector": "fusionrag"},
                                     {"selector": "boundary"}, {"recompute_ratio": 0.0}])  # fmt: skip
def test_answers_do_not_depend_on_what_others_have_asked(
    engine: FusedKVEngine, without: FusedKVEngine, template: str, options: dict[str, Any]
) -> None:
    """What is computed is the same below ratio 1 as well, whatever was asked before; only a repeated prompt goes on."""
    prompt = asked_in(template, CHUNKS[:3], QUESTIONS[0])
    want, wanted = ask(without, prompt, **options)
    before = [
        (asked_in(template, CHUNKS[:3], QUESTIONS[1]), options),
        (asked_in(template, CHUNKS[:3], QUESTIONS[1]), {"recompute_ratio": 1.0}),
        (asked_in(template, CHUNKS[2:], QUESTIONS[0]), {"recompute_ratio": 1.0}),
        (asked_in(template, CHUNKS[:2], QUESTIONS[0][:20]), {"recompute_ratio": 0.6}),
    ]
    for history in (*([one] for one in before), before):
        engine.clear_prefix_cache()
        for earlier, how in history:
            ask(engine, earlier, **how)
        got, logits = ask(engine, prompt, **options)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        assert got.token_ids == want.token_ids
        assert got.report.prompt_tokens == want.report.prompt_tokens


def test_a_system_prompt_is_computed_once(engine: FusedKVEngine) -> None:
    reports = [ask(engine, asked_in("question last", CHUNKS[:3], question))[0].report for question in QUESTIONS]
    system = len(engine.token_ids(SYSTEM))
    assert reports[0].prefix_cache_tokens == 0
    assert reports[1].prefix_cache_tokens > system
    assert reports[1].reused_tokens == reports[0].reused_tokens


def test_context_shifts_count_from_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the end of what earlier turns have left: a chunk stands as far back as it does."""
    # In their order, each once.
    weights = dict[tuple[int, int], None]()

    def noted(before: int, count: int) -> float:
        weights[before, count] = None
        return place_weight(before, count)

    monkeypatch.setattr("fused_kv_llm.kv.placed_chunk.place_weight", noted)
    first = rag_prompt(CHUNKS[:2], QUESTIONS[0])
    with make_engine(tmp_path) as engine:
        turn = conversation(first, "Yes.", f"{CHUNKS[2]}\n\n{QUESTIONS[1]}")
        ask(engine, turn)
        whole = list(weights)
        assert len(whole) == 3
        engine.clear_prefix_cache()
        ask(engine, first)
        weights.clear()
        assert ask(engine, turn)[0].report.prefix_cache_tokens > 100
        assert list(weights) == whole[-1:]


def test_a_cancelled_request_leaves_what_is_complete(engine: FusedKVEngine, without: FusedKVEngine) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    handle = engine.submit(prompt, max_tokens=1500)
    handle.wait_for_first()
    handle.cancel()
    with pytest.raises(RequestCancelledError):
        handle.result()
    got, logits = ask(engine, prompt)
    assert got.report.computed_tokens == 1
    torch.testing.assert_close(logits, ask(without, prompt)[1], atol=1e-4, rtol=1e-4)


def test_one_that_is_given_up_leaves_others_no_part_of_what_its_question_chose(
    engine: FusedKVEngine, without: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (rag_prompt(CHUNKS, question) for question in QUESTIONS)
    ask(engine, one)

    def given_up(*args: Any, **options: Any) -> Any:
        raise RequestCancelledError("given up")

    with monkeypatch.context() as patched:
        # Of the same prompt all is known but the last row, for the logits.
        patched.setattr(fusion, "forward_rows", given_up)
        patched.setattr(means, "forward_ragged", given_up)
        with pytest.raises(RequestCancelledError):
            engine.generate(one)
    got, logits = ask(engine, other)
    want, wanted = ask(without, other)
    assert got.report.reused_tokens == want.report.reused_tokens > 0
    assert got.report.recomputed_tokens == want.report.recomputed_tokens
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def test_a_request_that_shares_its_chunks_leaves_its_prompt(tmp_path: Path, without: FusedKVEngine) -> None:
    first = rag_prompt(CHUNKS, QUESTIONS[0])
    with make_engine(tmp_path, share_chunk_kv="always") as engine:
        shared, want = ask(engine, first)
        assert shared.report.shared_kv_bytes > 0
        again, got = ask(engine, first)
        assert (again.report.computed_tokens, again.token_ids) == (1, shared.token_ids)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        turn = conversation(first, "Yes.", f"{CHUNKS[0]}\n\n{QUESTIONS[1]}")
        second, got = ask(engine, turn)
        assert second.report.prefix_tokens >= len(engine.encode(first))
        assert second.report.shared_kv_bytes > 0
        engine.clear_prefix_cache()
    with make_engine(tmp_path, share_chunk_kv="never") as engine:
        ask(engine, first)
        torch.testing.assert_close(ask(engine, turn)[1], got, atol=1e-4, rtol=1e-4)


def test_a_request_that_fails_leaves_nothing(engine: FusedKVEngine) -> None:
    def broken(ids: Any, logits: Tensor) -> Tensor:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        engine.generate(rag_prompt(CHUNKS), constraint=broken)
    assert engine.requests.prefixes.nbytes == 0


def test_tenants_and_engines_share_nothing(tmp_path: Path) -> None:
    model, prompt = tiny_model(), rag_prompt(CHUNKS, QUESTIONS[0])
    with make_engine(tmp_path, model, tenant="a") as one, make_engine(tmp_path, model, tenant="b") as other:
        ask(one, prompt, recompute_ratio=1.0)
        report = ask(other, prompt, recompute_ratio=1.0)[0].report
        assert report.prefix_cache_tokens == 0
        assert ask(one, prompt, recompute_ratio=1.0)[0].report.computed_tokens == 1


def test_deleting_a_chunk_forgets_what_may_be_made_of_it(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    ask(engine, prompt)
    ask(engine, prompt, recompute_ratio=1.0)
    running = engine.submit(prompt, max_tokens=1500, recompute_ratio=0.5)
    running.wait_for_first()
    assert engine.delete_chunks(CHUNKS[:1]) == 1
    # Also what is being answered at that time.
    running.cancel()
    wait_until(lambda: running.done)
    assert engine.requests.prefixes.nbytes == 0
    report = ask(engine, prompt)[0].report
    assert (report.chunks_found, report.prefix_cache_tokens) == (len(CHUNKS) - 1, 0)


def test_refreshing_forgets_what_was_fused_from_other_context_shifts(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    ask(engine, prompt)
    assert engine.requests.prefixes.nbytes > 0
    engine.build_kv_cache(CHUNKS, preprocess="wait", refresh=True, progress=False)
    assert engine.requests.prefixes.nbytes == 0
    ask(engine, prompt)
    engine.preprocess(refresh=True, progress=False)
    assert engine.requests.prefixes.nbytes == 0


def test_a_model_that_was_changed_forgets_everything(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    ask(engine, prompt, recompute_ratio=1.0)
    hook = engine.model.model.layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(ModelChangedError):
        ask(engine, prompt, recompute_ratio=1.0)
    hook.remove()
    assert engine.requests.prefixes.nbytes == 0
    assert ask(engine, prompt, recompute_ratio=1.0)[0].report.prefix_cache_tokens == 0


def test_a_model_that_changes_during_an_answer_leaves_nothing(engine: FusedKVEngine) -> None:
    def change(ids: Any, logits: Tensor) -> Tensor:
        if len(ids) == 2:
            engine.model.model.norm.weight.data = engine.model.model.norm.weight.data * 2
        return logits

    engine.generate(rag_prompt(CHUNKS), max_tokens=4, constraint=change)
    assert engine.requests.prefixes.nbytes == 0


def test_it_is_bounded_and_can_be_switched_off(tmp_path: Path) -> None:
    with make_engine(tmp_path, prefix_cache_bytes="100kB") as engine:
        for question in QUESTIONS:
            for ratio in (0.3, 1.0):
                ask(engine, rag_prompt(CHUNKS, question), recompute_ratio=ratio)
                assert 0 < engine.requests.prefixes.nbytes <= 100_000
    assert engine.requests.prefixes.nbytes == 0
    with make_engine(tmp_path, prefix_cache_bytes=0) as engine:
        ask(engine, rag_prompt(CHUNKS))
        assert engine.requests.prefixes.nbytes == 0


def test_its_policy_is_an_option_of_its_own(tmp_path: Path) -> None:
    with make_engine(tmp_path, policy="lru") as engine:
        assert engine.requests.prefixes._eviction.policy == "gdsf"
    with make_engine(tmp_path, prefix_policy="lru") as engine:
        assert engine.requests.prefixes._eviction.policy == "lru"
    with pytest.raises(ConfigError, match="prefix_policy='newest' is unknown: use lru"):
        make_engine(tmp_path, prefix_policy="newest")


def test_prefill_neither_uses_nor_leaves_anything(engine: FusedKVEngine) -> None:
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    engine.prefill(prompt)[0].cache.release()
    assert engine.requests.prefixes.nbytes == 0
    ask(engine, prompt)
    prompt_kv, report = engine.prefill(prompt)
    prompt_kv.cache.release()
    assert report.prefix_cache_tokens == 0 < report.reused_tokens


def test_requests_beside_each_other_give_the_answers_of_requests_alone_at_ratio_one(
    engine: FusedKVEngine, without: FusedKVEngine
) -> None:
    prompts = [rag_prompt(CHUNKS[:count], question) for count in range(1, 5) for question in QUESTIONS] * 2
    want = [without.generate(prompt, max_tokens=6, recompute_ratio=1.0).token_ids for prompt in prompts]
    got = dict[int, list[int]]()

    def work(number: int) -> None:
        got[number] = engine.generate(prompts[number], max_tokens=6, recompute_ratio=1.0).token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[number] for number in range(len(prompts))] == want


def _ask_in_child(engine: FusedKVEngine, prompt: str, results: Any) -> None:
    torch.set_num_threads(1)
    before = engine.requests.prefixes.nbytes
    answer = engine.generate(prompt, max_tokens=4, recompute_ratio=1.0)
    results.put((before, answer.token_ids, answer.report.prefix_cache_tokens))


def test_a_forked_process_begins_anew(engine: FusedKVEngine) -> None:
    torch.set_num_threads(1)
    prompt = rag_prompt(CHUNKS, QUESTIONS[0])
    want = engine.generate(prompt, max_tokens=4, recompute_ratio=1.0).token_ids
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with engine.requests.prefixes._lock:
        child = context.Process(target=_ask_in_child, args=(engine, prompt, results))
        child.start()
    before, ids, cached = results.get(timeout=60)
    child.join(60)
    assert (before, ids, cached) == (0, want, 0)


@pytest.mark.real_model
@pytest.mark.parametrize("ratio", [1.0, 0.15])
def test_a_conversation_with_smollm2_computes_only_what_is_new(tmp_path: Path, ratio: float) -> None:
    """Its chat template continues: a turn's prompt and answer are the first tokens of the next turn's prompt."""
    options = {"kv_dir": tmp_path, "dtype": "float32", "preprocessing": "none", "recompute_ratio": ratio,
               "prefix_cache_bytes": None}  # fmt: skip
    with FusedKVEngine("smollm2-135m", **options) as engine:
        engine.build_kv_cache(CHUNKS, progress=False)
        messages = [{"role": "user", "content": rag_prompt(CHUNKS, QUESTIONS[0])}]
        for question in ("Which is the largest?", "And who owns her?"):
            answer = engine.generate(messages, max_tokens=40)
            before = len(engine.encode(messages)) + len(answer.token_ids) - 1
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
            report = engine.generate(messages, max_tokens=1).report
            assert report.prefix_tokens == before
            assert report.computed_tokens == len(engine.encode(messages)) - before < 30
            assert report.chunks_found == len(CHUNKS)
        if ratio == 1.0:
            got = engine.generate(messages, max_tokens=12).token_ids
            engine.clear_prefix_cache()
            assert engine.generate(messages, max_tokens=12).token_ids == got
