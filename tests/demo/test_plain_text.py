"""Tables and web pages as plain text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from fused_kv_llm.demo.plain_text import csv_text, html_text


def test_tables() -> None:
    table = 'ship,"seats, in all"\nAldebaran,120\n\n"two\nlines"\nBellatrix,80,extra\n'
    assert csv_text(table) == (
        "ship: Aldebaran; seats, in all: 120\n\nship: two\nlines\n\nship: Bellatrix; seats, in all: 80; extra"
    )
    assert csv_text("") == csv_text("a,b\n") == ""


def test_pages() -> None:
    page = """<!doctype html><html><head><title>Fleet</title><style>p {color: red}</style></head>
    <body><!-- unseen --><script>if (a < b) document.write("<p>no</p>")</script>
    <p>The <b>Alde</b>baran&nbsp;&amp; others<br>sail.<ul><li>one<li>two</ul><template><p>no</p></template></body>"""
    assert html_text(page) == "Fleet\n\nThe Aldebaran & others\n\nsail.\n\none\n\ntwo"


def test_declarations_are_not_seen() -> None:
    assert html_text("<p>a<![if b]>c<![CDATA[d]]>e<!doctype html>f") == "acef"


@example("<![;")
@example("a<![")
@given(st.text(alphabet=st.sampled_from('<>/&;"=!-ab \n[]?'), max_size=60))
def test_pages_that_are_none_are_read_somehow(page: str) -> None:
    assert isinstance(html_text(page), str)
