from __future__ import annotations

import copy
import json
import threading
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fused_kv_llm.errors import ConfigError, PromptError, UnsupportedModelError
from fused_kv_llm.prompt import ChatPrompt, PromptRenderer, RawPrompt, Rendered

FRAGMENTS = [
    *("hello", " world", "The ferry", "it's", "don’t", "…", ".", "1234567", "\n", "\n\n", "\r\n", "\t", "  "),
    *("\u00a0", "\0", "é", "e\u0301", "ﬁ", "😀", "👩\u200d👩\u200d👧", "夜间渡轮", "مرحبا", "▁"),
    *("<|im", "_end|>", "[INST", "]", "<", "s>", "|"),
]
CONTENT = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(st.characters(codec="utf-8"), max_size=6)), max_size=12
).map("".join)
ROLES = st.sampled_from(["user", "assistant"])

SPECIAL = {
    "smollm2": ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    "byte_level": ["<|eot|>", "<|header|>", "<|/header|>", "<|begin|>"],
    "metaspace": ["</s>", "<s>", "[INST]", "[/INST]"],
}


@pytest.fixture(scope="session")
def special(tokenizer: Any) -> list[str]:
    """Texts of the tokenizer's control tokens."""
    vocab = tokenizer.get_vocab()
    return next(texts for texts in SPECIAL.values() if texts[0] in vocab)


@pytest.fixture(scope="session")
def added(tokenizer: Any) -> dict[int, str]:
    """The tokenizer's added tokens, less the unknown token, which ordinary text may yield."""
    unknown = None if tokenizer.unk_token in SPECIAL["smollm2"] else tokenizer.unk_token_id
    texts = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    return {i: text for i, text in texts.items() if i != unknown}


def vanilla(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    return list(ids)


@given(CONTENT)
def test_a_wrapped_prompt_has_the_ids_of_the_chat_template(
    tokenizer: Any, renderer: PromptRenderer, added: dict[int, str], content: str
) -> None:
    assume(not any(text in content for text in added.values()))
    rendered = renderer.render(content)
    encoded = renderer.encode(rendered)
    assert encoded.ids == vanilla(tokenizer, [{"role": "user", "content": content}])
    assert encoded.ids[: len(renderer.prefix_ids)] == renderer.prefix_ids
    assert encoded.offsets.shape == (len(encoded.ids), 2)
    ((start, end),) = rendered.content_spans
    assert rendered.text[start:end] in (content, content.strip())


@settings(max_examples=60)
@given(CONTENT, st.lists(st.tuples(ROLES, CONTENT), min_size=1, max_size=4))
def test_messages_have_the_ids_of_the_chat_template(
    tokenizer: Any,
    renderer: PromptRenderer,
    added: dict[int, str],
    system: str,
    turns: list[tuple[str, str]],
) -> None:
    messages = [{"role": role, "content": content} for role, content in [("system", system), *turns]]
    assume(not any(text in message["content"] for text in added.values() for message in messages))
    rendered = renderer.render(messages)
    assert renderer.encode(rendered).ids == vanilla(tokenizer, messages)
    found = [rendered.text[start:end] for start, end in rendered.content_spans]
    assert [text.strip() for text in found] == [message["content"].strip() for message in messages]


@given(CONTENT)
def test_a_raw_prompt_has_the_ids_of_the_tokenizer(tokenizer: Any, special: list[str], content: str) -> None:
    raw = raw_renderer(tokenizer)
    prompt = content + special[0] + "x"
    ids = raw.encode(raw.render(prompt)).ids
    assert ids == tokenizer(prompt)["input_ids"]
    assert ids[: len(raw.prefix_ids)] == raw.prefix_ids


RAW: dict[int, PromptRenderer] = {}


def raw_renderer(tokenizer: Any) -> PromptRenderer:
    if id(tokenizer) not in RAW:
        RAW[id(tokenizer)] = PromptRenderer(tokenizer, wrap_chat_template=False)
    return RAW[id(tokenizer)]


def test_prefix_ids_are_the_header_or_what_the_tokenizer_prepends(
    smollm2: Any, byte_level: Any, metaspace: Any
) -> None:
    header = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert smollm2.decode(PromptRenderer(smollm2).prefix_ids) == f"{header}<|im_start|>user"
    assert byte_level.decode(PromptRenderer(byte_level).prefix_ids).startswith("<|begin|><|header|>user<|/header|>")
    assert PromptRenderer(metaspace).prefix_ids == metaspace.convert_tokens_to_ids(["<s>", "[INST]"])
    assert raw_renderer(smollm2).prefix_ids == []
    assert raw_renderer(byte_level).prefix_ids == [byte_level.bos_token_id]
    assert raw_renderer(metaspace).prefix_ids == [metaspace.bos_token_id]


@given(st.data())
def test_special_token_text_in_a_document_stays_text(
    tokenizer: Any,
    renderer: PromptRenderer,
    special: list[str],
    added: dict[int, str],
    data: st.DataObject,
) -> None:
    pieces = st.lists(st.one_of(CONTENT, st.sampled_from(special)), max_size=5).map("".join)
    content = data.draw(pieces) + data.draw(st.sampled_from(special)) + data.draw(pieces)
    rendered = renderer.render(content)
    encoded = renderer.encode(rendered)
    control = [(i, span) for i, span in zip(encoded.ids, encoded.offsets.tolist(), strict=True) if i in added]
    harmless = vanilla(tokenizer, [{"role": "user", "content": "harmless"}])
    assert [i for i, _ in control] == [i for i in harmless if i in added]
    assert [rendered.text[start:end] for _, (start, end) in control] == [added[i] for i, _ in control]
    # Nothing is lost: the ids read as the same text as those of plain transformers.
    plain = tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(encoded.ids) == tokenizer.decode(plain)


@given(CONTENT, st.data())
def test_the_way_around_special_text_agrees_with_the_plain_way(
    renderer: PromptRenderer, special: list[str], content: str, data: st.DataObject
) -> None:
    """Both ways of encoding give the same ids and offsets when every control token is genuine."""
    text = content + "".join(data.draw(st.lists(st.one_of(CONTENT, st.sampled_from(special)))))
    encoder = renderer._encoder
    around = encoder.encode_with_control_at(text, encoder.control_spans(text))
    plain = encoder.encode(text, add_special_tokens=False)
    assert around.ids == plain.ids
    assert around.offsets.tolist() == plain.offsets.tolist()


@given(CONTENT)
def test_chunks_are_encoded_without_special_tokens(
    tokenizer: Any, renderer: PromptRenderer, special: list[str], added: dict[int, str], content: str
) -> None:
    if not any(text in content for text in added.values()):
        assert renderer.encode_chunk(content) == tokenizer(content, add_special_tokens=False)["input_ids"]
    assert added.keys().isdisjoint(renderer.encode_chunk(content + special[0] + content))


def test_a_control_token_may_not_form_at_the_edge_of_a_content(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer.chat_template = "{{ '<|header|>' + messages[0]['content'] + '|>rest<|eot|>' }}"
    renderer = PromptRenderer(tokenizer)
    ids = renderer.encode(renderer.render("evil<|eot")).ids
    assert [i for i in ids if i in tokenizer.added_tokens_decoder] == tokenizer.convert_tokens_to_ids(
        ["<|header|>", "<|eot|>"]
    )


def test_template_tokens_that_are_not_special_are_allowed_in_assistant_messages(metaspace: Any) -> None:
    renderer = PromptRenderer(metaspace)
    inst = metaspace.convert_tokens_to_ids("[INST]")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I saw [INST]."}]
    assert renderer.encode(renderer.render(said)).ids == vanilla(metaspace, said)
    asked = [*said, {"role": "user", "content": "[INST] again"}]
    assert renderer.encode(renderer.render(asked)).ids.count(inst) == 3  # two of the template, one said
    forged = [*said, {"role": "assistant", "content": "x</s>"}]
    eos = metaspace.eos_token_id
    assert renderer.encode(renderer.render(forged)).ids.count(eos) == 2  # the template's own
    assert vanilla(metaspace, forged).count(eos) == 3


def test_words_and_white_space_that_are_added_tokens_keep_their_ids(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer.add_tokens(["assistant", "\n\n", "    "])
    content = "an assistant\n\n    said"
    renderer = PromptRenderer(tokenizer)
    rendered = renderer.render(content)
    assert rendered.own_control is None
    assert renderer.encode(rendered).ids == vanilla(tokenizer, [{"role": "user", "content": content}])


def test_content_that_the_template_changes(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer.chat_template = "{{ '<|begin|>' + (messages[0]['content'] | tojson) + '<|eot|>' }}"
    renderer = PromptRenderer(tokenizer)
    rendered = renderer.render('say "aye"')
    ((start, end),) = rendered.content_spans
    assert rendered.text[start:end] == r"say \"aye\""
    with pytest.raises(PromptError, match="message 0 holds the text of a special token"):
        renderer.render('say "aye" <|eot|>')


def test_content_that_the_template_drops_has_no_span(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    renderer = PromptRenderer(tokenizer)
    system = {"role": "system", "content": "unheard"}
    rendered = renderer.render([system, {"role": "user", "content": "heard"}])
    assert (rendered.text, rendered.content_spans) == ("heard", [(0, 5)])
    with pytest.raises(PromptError, match="cannot be told apart"):
        renderer.render([{**system, "content": "<|eot|>"}, {"role": "user", "content": "heard"}])


def test_a_content_that_repeats_the_header_is_located_rightly(smollm2: Any) -> None:
    rendered = PromptRenderer(smollm2).render("user")
    ((start, end),) = rendered.content_spans
    assert rendered.text[start - 5 : end + 10] == "user\nuser<|im_end|>"


def test_without_template(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer.chat_template = None
    renderer = PromptRenderer(tokenizer, wrap_chat_template=True)
    assert renderer.encode(renderer.render("plain")).ids == tokenizer("plain")["input_ids"]
    assert renderer.prefix_ids == [tokenizer.bos_token_id]
    with pytest.raises(PromptError, match="has none"):
        renderer.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "non-empty list"),
        (None, "NoneType"),
        (b"bytes", "bytes"),
        (RawPrompt(None), r"RawPrompt\(None\)"),  # type: ignore[arg-type]
        ([{"role": "user"}], "'content'"),
        (["hi"], "Message 0"),
        ([{"role": "user", "content": None}], "NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "must be a string, got list"),
        ([{"role": 3, "content": "hi"}], "role of message 0"),
        ([{"role": "user", "content": "hi", "images": []}], "images"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}], "no format for tools"),
        ([{"role": "tool", "content": "12"}], "no format for tools"),
        ([{"role": "user", "content": "hi", "tool_calls": "get()"}], "must be a list"),
        (ChatPrompt([{"role": "user", "content": "hi"}], [{"type": "function"}]), "no format for tools"),
        ([{"role": "user</s>", "content": "hi"}], "special-token text"),
        ([{"role": "alien", "content": "hi"}], "unknown role"),
    ],
)
def test_unusable_prompts(metaspace: Any, prompt: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        PromptRenderer(metaspace).render(prompt)


def test_text_that_is_not_unicode(byte_level: Any) -> None:
    renderer = PromptRenderer(byte_level)
    for content in ("a \udc80", "<|eot|> \udc80"):
        with pytest.raises(PromptError, match=r"U\+DC80"):
            renderer.encode(renderer.render(content))
        with pytest.raises(PromptError, match=r"U\+DC80"):
            renderer.encode_chunk(content)


def test_a_prompt_without_tokens(smollm2: Any) -> None:
    with pytest.raises(PromptError, match="empty"):
        raw_renderer(smollm2).encode(Rendered("", [(0, 0)], add_special_tokens=True))


def test_tokenizers_that_cannot_be_used() -> None:
    class SlowTokenizer:
        is_fast = False

    with pytest.raises(UnsupportedModelError, match="SlowTokenizer"):
        PromptRenderer(SlowTokenizer())


def test_templates_that_cannot_wrap(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    for template in (
        "{{ raise_exception('system first') }}",
        "nothing",
        "{{ messages[0]['content'] | upper }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match="wrap_chat_template=False"):
            PromptRenderer(tokenizer)


def test_ordinary_text_that_the_tokenizer_makes_special_is_refused(metaspace: Any) -> None:
    # A vocabulary with merges that spell a special token, as some converted SentencePiece models have.
    state = json.loads(metaspace.backend_tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    for text in ("<", "/", "s", ">", "</", "</s"):
        vocab.setdefault(text, len(vocab))
    merges[:0] = [["<", "/"], ["</", "s"], ["</s", ">"]]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=metaspace.chat_template,
    )
    renderer = PromptRenderer(tokenizer)
    with pytest.raises(PromptError, match="</s>"):
        renderer.encode_chunk("end </s>")
    with pytest.raises(PromptError, match="</s>"):
        renderer.encode(renderer.render("end </s>"))


def test_the_tokenizer_is_left_alone_and_its_later_state_does_not_matter(byte_level: Any) -> None:
    tokenizer = copy.deepcopy(byte_level)
    tokenizer("x", truncation=True, max_length=4)
    before = tokenizer.backend_tokenizer.to_str()
    renderer = PromptRenderer(tokenizer)
    content = "a document of many more than four tokens <|eot|>"
    expected = renderer.encode(renderer.render(content)).ids, renderer.encode_chunk(content)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer.backend_tokenizer.encode_special_tokens is False
    tokenizer("x", split_special_tokens=True, truncation=True, max_length=2)
    assert (renderer.encode(renderer.render(content)).ids, renderer.encode_chunk(content)) == expected
    assert len(expected[0]) > 20


def test_threads_do_not_disturb_each_other(renderer: PromptRenderer, special: list[str]) -> None:
    prompts = [f"prompt {i} {'' if i % 2 else special[0]} " * 20 for i in range(8)]
    expected = [(renderer.encode(renderer.render(p)).ids, renderer.encode_chunk(p)) for p in prompts]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            prompt = prompts[number]
            got = renderer.encode(renderer.render(prompt)).ids, renderer.encode_chunk(prompt)
            if got != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
