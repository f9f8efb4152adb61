"""The demo's questions: made by a rule, one about each of the first three passages of every file."""

from __future__ import annotations

import re

from fused_kv_llm.demo import handbook_folder, handbook_passages, handbook_questions

FILES = sorted(path.name for path in handbook_folder().glob("*.txt"))
# Numbers that are part of a name.
NAMES = re.compile(r"\b(Routes?|[Cc]hannel|deck|form) (\w?\d+(, | and )?)+")


def passage(file: str, number: int) -> str:
    return (handbook_folder() / file).read_text(encoding="utf-8").split("\n\n")[number - 1]


def test_every_file_has_three_questions_in_order() -> None:
    asked = [(entry["passage"], entry["file"]) for entry in handbook_questions()]
    assert asked == [(number, file) for number in (1, 2, 3) for file in FILES]


def test_each_asks_for_the_first_number_of_its_passage() -> None:
    for entry in handbook_questions():
        text = NAMES.sub("", passage(entry["file"], entry["passage"]))
        first = re.search(r"\d", text)
        assert first is not None
        begins = text.index(entry["answer"])
        assert begins <= first.start() < begins + len(entry["answer"]), entry


def test_no_question_gives_its_answer_away() -> None:
    for entry in handbook_questions():
        assert not re.search(rf"\b{re.escape(entry['answer'])}\b", entry["question"]), entry


def test_the_handbook_is_the_passages_of_its_files() -> None:
    assert len(handbook_passages()) == 87
    assert handbook_passages()[0] == passage("01-fleet.txt", 1)
