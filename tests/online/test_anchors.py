"""QCFuse: anchors stored beside chunks, the probe that sees only them, and what it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_kernels.reference import token_scores_reference
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.context_shift import shift_name
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.kv import PlacedChunk
from fused_kv_llm.online import Request
from fused_kv_llm.online.anchors import read_anchors
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Anchors, QueryAttention, View
from fused_kv_llm.selectors.anchors import anchor_positions, knorm_scores, sidecar_names, sink_scores
from fused_kv_llm.selectors.profiles import critical_layers, save_profile
from fused_kv_llm.selectors.views import AnchorRule

from .reference_fusion import finish, project, recompute_rows, stitched_kv

LAYERS = (1, 3)
ANCHORS = Anchors("kvzip", 0.2)
MINE = QueryAttention("mine", layers=LAYERS, anchors=ANCHORS)
(NAME,) = sidecar_names(View(LAYERS, anchors=ANCHORS))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    folder: Path = tmp_path_factory.mktemp("anchors")
    model = tiny_model(num_hidden_layers=5)
    with FusedKVEngine(
        model, tokenizer=smollm2_tokenizer(), kv_dir=folder, selector=MINE, preprocessing="none", store_misses=False
    ) as engine:
        engine.build_kv_cache(SHORT[:5], progress=False)
        yield engine


def plan(engine: FusedKVEngine) -> Request:
    return engine.requests.planner.plan(rag_prompt(SHORT[:5]), FusionReport())


def stored_anchors(engine: FusedKVEngine, request: Request) -> list[int]:
    found = []
    for chunk in request.chunks:
        side = engine.store.sidecars.read(chunk.stored.key, NAME)
        assert side is not None
        places = side["positions"].long() - chunk.segment.chunk_start + chunk.segment.start
        found += [p for p in places.tolist() if chunk.segment.start <= p < chunk.segment.stop]
    return found


def sidecar_path(engine: FusedKVEngine, key: str, name: str) -> Path:
    (path,) = (path for path in Path(engine.store.kv_dir).rglob(f"*{name}*") if key in str(path))
    return path


def test_a_file_is_named_after_rule_ratio_and_layers() -> None:
    view = View((21, 22, 23), anchors=Anchors("kvzip", 0.1))
    assert sidecar_names(view) == ("anchor-kv-kvzip-0.1-21-22-23",)
    assert sidecar_names(replace(view, anchor_shift="shift-2")) == (
        "anchor-kv-kvzip-0.1-21-22-23-shift-2-shifted", "anchor-kv-kvzip-0.1-21-22-23",
    )  # fmt: skip
    assert sidecar_names(View((1,))) == ()
    anchors, shift = Anchors("knorm_high", 0.05, "int8"), shift_name(10, 4)
    views = [View(tuple(range(count)), anchors=anchors, anchor_shift=shift) for count in (40, 80, 81)]
    names = {name for one in views for name in sidecar_names(one)}
    assert len(names) == 6, "whatever the number of layers"
    assert max(map(len, names)) <= 100, "the longest name of a sidecar"


@torch.inference_mode()
def test_kvzip_equals_a_plain_repetition(engine: FusedKVEngine) -> None:
    text, decoder = SHORT[1], engine.model.model
    key = engine.chunk_id(text)
    assert key is not None
    chunk = engine.token_ids(text)
    repeat = engine.token_ids("\n\nRepeat the previous context exactly.\n\n") + chunk
    header = list(engine.renderer.header_ids)
    # The chunk stands where it was prefilled, so the plain way is one forward over header, chunk and repetition.
    ids = torch.tensor([header + chunk + repeat])
    out = engine.model(ids, output_hidden_states=True)
    total = torch.zeros(len(chunk))
    for layer, hidden in zip(decoder.layers, out.hidden_states[:-1], strict=True):
        q, k, _ = project(layer, hidden, decoder.rotary_emb(hidden, torch.arange(ids.shape[1])[None]))
        scores = layer.self_attn.scaling * q[0] @ k[0].repeat_interleave(3, 0).transpose(1, 2)
        weights = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf")).softmax(-1)
        best = weights[:, -len(chunk) :, len(header) : len(header) + len(chunk)].amax((0, 1))
        total += best / len(decoder.layers)
    with engine.store.open(key, chunk) as stored:
        got = engine.corpus._anchors.scores(stored, chunk, ANCHORS)
    torch.testing.assert_close(got, total, atol=1e-5, rtol=1e-4)
    side = engine.store.sidecars.read(key, NAME)
    assert side is not None
    assert side["positions"].tolist() == sorted(total.topk(math.ceil(0.2 * len(chunk))).indices.tolist())


@torch.inference_mode()
def test_scores_equal_a_question_that_sees_header_and_anchors_only(engine: FusedKVEngine) -> None:
    request, decoder = plan(engine), engine.model.model
    full = stitched_kv(engine, request)
    rows, question = request.question_rows()
    chunk = request.chunk_positions
    seen = torch.tensor(sorted([*range(request.prefix_tokens), *stored_anchors(engine, request), *rows.tolist()]))
    available = torch.cat((torch.arange(request.prefix_tokens), chunk, rows)).sort().values
    hidden = decoder.embed_tokens(torch.tensor([request.ids])[:, rows])
    want = []
    for index, layer in enumerate(decoder.layers[: max(LAYERS) + 1]):
        q, k, v = project(layer, hidden, decoder.rotary_emb(hidden, rows[None]))
        full.keys[index][:, :, rows], full.values[index][:, :, rows] = k, v
        if index in LAYERS:
            at = torch.searchsorted(available, rows[-question:])
            mass = token_scores_reference(q[0], full.keys[index, 0][:, available], at, layer.self_attn.scaling)
            want.append(mass[torch.searchsorted(available, chunk)])
        out = torch.nn.functional.scaled_dot_product_attention(
            q, full.keys[index][:, :, seen], full.values[index][:, :, seen],
            attn_mask=seen[None, :] <= rows[:, None], scale=layer.self_attn.scaling, enable_gqa=True,
        )  # fmt: skip
        hidden = finish(layer, hidden, out)
    positions, got = engine.requests.attention_by_layer(rag_prompt(SHORT[:5]), View(LAYERS, anchors=ANCHORS))
    assert torch.equal(positions, chunk)
    torch.testing.assert_close(got, torch.stack(want), atol=1e-5, rtol=1e-4)
    budget = int(0.3 * chunk.shape[0])
    fused, _ = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    best = torch.stack(want).mean(0).topk(budget).indices
    assert fused.selected.tolist() == sorted(chunk[best].tolist())


def test_nothing_of_the_probe_is_left_in_the_fused_pass(engine: FusedKVEngine) -> None:
    request = plan(engine)
    fused, _ = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    stored = stitched_kv(engine, request)
    rows = request.rows(fused.selected)
    logits, keys, values = recompute_rows(
        engine.model, request.ids, rows, stored.keys, stored.values, request.kind, 0.0
    )
    torch.testing.assert_close(fused.logits, logits, atol=1e-4, rtol=1e-4)
    count = request.num_tokens
    torch.testing.assert_close(fused.cache.keys[..., :count, :], keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.cache.values[..., :count, :], values, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_anchors_stand_side_by_side_between_the_rows_of_the_prompt(engine: FusedKVEngine) -> None:
    """Also of a chunk that is there twice, once in part, behind a question of some length."""
    question = "Question: which of the following passages says how many passengers there are?"
    planned = engine.requests.planner.plan(f"{question}\n\n{SHORT[1]}\n\n{SHORT[2]}\n\n{SHORT[1]}", FusionReport())
    first, second, third = planned.chunks
    segment = third.segment
    cut = replace(segment, start=segment.start + 3, stop=segment.stop - 4, chunk_start=segment.chunk_start + 3)
    chunks = [first, second, PlacedChunk(cut, third.stored)]
    request = Request(planned.ids, planned.prefix_tokens, chunks)
    rows, _ = request.question_rows()
    assert int(rows[0]) < request.chunks[0].segment.start
    anchors = read_anchors(
        request, View(LAYERS, anchors=ANCHORS), ANCHORS, engine.store.sidecars, engine.loaded.geometry
    )
    positions = torch.cat(anchors.positions)
    assert positions.tolist() == stored_anchors(engine, request)
    header = torch.arange(request.prefix_tokens)
    visible = torch.cat((header, positions, rows)).sort().values
    available = torch.cat((header, request.chunk_positions, rows)).sort().values
    full, cache = stitched_kv(engine, request), stitched_kv(engine, request)
    scored = anchors.place(cache, visible, available)
    among = torch.isin(visible, positions)
    for part_of, want in ((cache.keys, full.keys), (cache.values, full.values)):
        got = part_of[: max(LAYERS), :, :, : visible.shape[0]][:, :, :, among]
        torch.testing.assert_close(got, want[: max(LAYERS), :, :, positions])
        assert torch.equal(part_of[..., : request.prefix_tokens, :], want[..., : request.prefix_tokens, :])
    chunk = torch.isin(available, request.chunk_positions)
    want = full.keys[list(LAYERS), 0][:, :, request.chunk_positions]
    torch.testing.assert_close(scored[:, :, chunk], want)


def test_the_probe_reads_the_side_files_only(engine: FusedKVEngine) -> None:
    engine.store.drop_memory()
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    sides = [engine.store.sidecars.read(p.stored.key, NAME) for p in plan(engine).chunks]
    assert report.selection_bytes == sum(part.nbytes for side in sides for part in side.values())
    assert report.sidecar_bytes_loaded == {"anchors": report.selection_bytes}
    # The keys of two of 5 layers; for a fifth of the tokens values of three layers, and keys of the other two of these.
    share, want = report.selection_bytes / sum(report.bytes_loaded.values()), (0.5 * 2 + 0.2 * (0.5 * 3 + 0.5 * 2)) / 5
    assert want <= share < want + 0.03
    assert report.warnings == []


def test_anchors_in_eight_bits_score_nearly_alike_from_fewer_bytes(engine: FusedKVEngine) -> None:
    eight_bit = replace(ANCHORS, storage="int8")
    few = QueryAttention("few", layers=LAYERS, anchors=eight_bit)
    assert engine.build_anchors(SHORT[:5], selector=few, progress=False) == 5
    prompt = rag_prompt(SHORT[:5])
    _, want = engine.requests.attention_by_layer(prompt, View(LAYERS, anchors=ANCHORS))
    _, got = engine.requests.attention_by_layer(prompt, View(LAYERS, anchors=eight_bit))
    assert not torch.equal(got, want), "they are other numbers"
    read = read_anchors(
        plan(engine), View(LAYERS, anchors=eight_bit), eight_bit, engine.store.sidecars, engine.loaded.geometry
    )
    tensors = [*read.scored_keys, *(part for pair in read.anchors for part in pair)]
    assert {part.dtype for part in tensors} == {engine.loaded.dtype}
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0.05)
    whole, small = (engine.prefill(prompt, recompute_ratio=0.3, selector=rule)[1] for rule in (MINE, few))
    assert small.warnings == []
    # The KV is in float32, so it is a quarter of the bytes, and the scales.
    assert 0.25 < small.selection_bytes / whole.selection_bytes < 0.32


def test_the_first_layer_alone_needs_no_anchors_below_it(engine: FusedKVEngine) -> None:
    first = QueryAttention("first", layers=(0,), anchors=Anchors("sink", 0.2))
    assert engine.build_anchors(SHORT[:5], selector=first, progress=False) == 5
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=first)
    whole = QueryAttention("whole", layers=(0,))
    assert report.warnings == []
    got, _ = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=first)
    want, _ = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=whole)
    assert torch.equal(got.selected, want.selected)


def test_other_selectors_read_whole_layers(engine: FusedKVEngine) -> None:
    for selector, share in (("fusionrag", 1 / 5), ("prophetkv", 1.0), ("boundary", 0.0), ("cacheblend", 4 / 5)):
        _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=selector)
        assert report.selection_bytes == pytest.approx(share * sum(report.bytes_loaded.values()))


def test_a_chunk_without_anchors_is_read_and_reported(engine: FusedKVEngine) -> None:
    key = engine.chunk_id(SHORT[2])
    assert key is not None
    before = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)[1].selection_bytes
    path = sidecar_path(engine, key, NAME)
    side = engine.store.sidecars.read(key, NAME)
    path.unlink()
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    # Layers up to the deepest critical one are read, whatever of them is used.
    (placed,) = engine.requests.planner.plan(rag_prompt([SHORT[2]]), FusionReport()).chunks
    with placed.stored as chunk:
        whole = chunk.nbytes * (max(LAYERS) + 1) // chunk.num_layers
    assert side is not None
    assert report.selection_bytes - before == whole - sum(part.nbytes for part in side.values())
    (warning,) = (w for w in report.warnings if "1 chunks have no stored anchors" in w)
    assert "asked for was kvzip at 0.2, the one used for them is sink" in warning
    assert engine.build_anchors(SHORT[:5], progress=False) == 1
    assert engine.build_anchors(SHORT[:5], progress=False) == 0
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    assert report.warnings == []


def test_a_selector_of_one_call_says_which_rule_it_had_to_use(engine: FusedKVEngine) -> None:
    """Nothing was stored for it, and nothing is silently measured by another rule."""
    other = QueryAttention("other", layers=LAYERS, anchors=Anchors("knorm_high", 0.4))
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=other)
    (warning,) = report.warnings
    assert "knorm_high at 0.4" in warning
    assert "used for them is sink" in warning
    sink = QueryAttention("sink", layers=LAYERS, anchors=Anchors("sink", 0.4))
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector=sink)
    assert "asked for was" not in report.warnings[0], "the rule is the one asked for, only read from whole layers"


def test_chunks_met_in_prompts_get_the_anchors_of_the_engines_selector(tmp_path: Path) -> None:
    with FusedKVEngine(
        tiny_model(num_hidden_layers=5), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, selector=MINE,
        preprocessing="none",
    ) as engine:  # fmt: skip
        engine.prefetch(SHORT[:2])
        engine.generate(rag_prompt(SHORT[:2]), max_tokens=1, recompute_ratio=0.0)
        engine.wait_for_background(progress=False)
        report = engine.prefill(rag_prompt(SHORT[:2]), recompute_ratio=0.3)[1]
        assert (report.chunks_found, report.warnings) == (2, [])
        # The KV of a chunk right behind the header is taken from an answered prompt, and gets anchors as well.
        engine.generate(f"{SHORT[2]}\n\nWhat does it say?", max_tokens=1, recompute_ratio=1.0)
        assert engine.prefetch(SHORT[2:3]) == [engine.chunk_id(SHORT[2])] != [None]
        engine.wait_for_background(progress=False)
        report = engine.prefill(rag_prompt(SHORT[2:3]), recompute_ratio=0.3)[1]
        assert (report.chunks_found, report.warnings) == (1, [])


def test_a_damaged_side_file_is_a_miss(engine: FusedKVEngine) -> None:
    key = engine.chunk_id(SHORT[3])
    assert key is not None
    path = sidecar_path(engine, key, NAME)
    whole = bytearray(path.read_bytes())
    for broken in (bytes(whole[: len(whole) // 2]), bytes(whole[:-3]) + b"\x7f\x7f\x7f"):
        path.write_bytes(broken)
        with pytest.warns(UserWarning, match="cannot be used"):
            assert engine.store.sidecars.read(key, NAME) is None
        assert not path.exists()
    path.write_bytes(bytes(whole))
    assert engine.store.sidecars.read(key, NAME) is not None


@pytest.mark.parametrize("change", [lambda side: {}, lambda side: {**side, "positions": side["positions"] + 1_000}])
def test_a_side_file_that_does_not_fit_is_a_miss_and_is_made_again(
    engine: FusedKVEngine, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    """It may be whole and yet from an archive of a stranger."""
    key = engine.chunk_id(SHORT[3])
    assert key is not None
    sidecars = engine.store.sidecars
    side = sidecars.read(key, NAME)
    assert side is not None
    sidecars.remove(key, NAME)
    expected, _ = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    sidecars.put(key, NAME, {**change(side), "nothing": torch.zeros(0)})
    with pytest.warns(FusedKVWarning, match="do not fit this model and this chunk"):
        fused, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)
    assert torch.equal(fused.logits, expected.logits)
    assert any("1 chunks have no stored anchors" in warning for warning in report.warnings)
    assert engine.build_anchors(SHORT[:5], progress=False) == 1
    assert engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3)[1].warnings == []
    again = sidecars.read(key, NAME)
    assert again is not None
    assert all(torch.equal(again[name], part) for name, part in side.items())


def test_deleted_chunks_leave_no_anchors(engine: FusedKVEngine) -> None:
    key = engine.chunk_id(SHORT[4])
    assert key is not None
    engine.delete_chunks([SHORT[4]])
    assert not engine.store.sidecars.has(key, NAME)
    engine.build_kv_cache([SHORT[4]], progress=False)
    assert engine.store.sidecars.has(key, NAME)


def test_rules_rank_by_place_and_by_norm() -> None:
    assert anchor_positions(sink_scores(25), 0.1).tolist() == [0, 1, 2]
    keys = torch.ones(2, 3, 4, 5) * torch.tensor([4.0, 1.0, 3.0, 2.0])[:, None]
    assert torch.allclose(knorm_scores(keys), -torch.tensor([4.0, 1.0, 3.0, 2.0]) * 5**0.5)
    assert anchor_positions(knorm_scores(keys), 0.5).tolist() == [1, 3]


def test_critical_layers_of_a_profile_and_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: FusedKVEngine
) -> None:
    monkeypatch.setenv("FUSED_KV_CACHE", str(tmp_path))
    assert critical_layers("unknown", 30) == ((14, 15, 16), False)
    assert critical_layers("unknown", 1) == ((0,), False)
    save_profile("known", {"layers": [17, 3, 9]})
    assert critical_layers("known", 30) == ((3, 9, 17), True)
    _, report = engine.prefill(rag_prompt(SHORT[:5]), recompute_ratio=0.3, selector="qcfuse")
    assert any("were not profiled" in warning for warning in report.warnings)


@pytest.mark.parametrize(("rule", "sign"), [("knorm", -1.0), ("knorm_high", 1.0)])
def test_norms_rank_by_either_sign(engine: FusedKVEngine, rule: AnchorRule, sign: float) -> None:
    """The lowest norms draw attention (Devoto et al.); QCFuse's demonstration keeps the highest."""
    anchors = Anchors(rule, 0.25)
    engine.build_anchors(SHORT[:1], selector=QueryAttention(f"by_{rule}", layers=LAYERS, anchors=anchors))
    key = engine.chunk_id(SHORT[0])
    assert key is not None
    side = engine.store.sidecars.read(key, *sidecar_names(View(LAYERS, anchors=anchors)))
    stored = engine.store.open(key, engine.token_ids(SHORT[0]), counted=False)
    assert side is not None
    assert stored is not None
    with stored:
        keys = stored.read_layers(0, stored.num_layers)[0].double()
    norms = (keys**2).sum(-1).sqrt().mean((0, 1))
    count = -(-norms.shape[0] // 4)
    assert side["positions"].tolist() == sorted((sign * norms).topk(count).indices.tolist())
