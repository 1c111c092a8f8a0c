"""Text of strangers cannot control a terminal, or begin a line of its own in a log."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.gateway.access_log import JsonFormatter
from pipeline.printable import PrintableFormatter, json_text, printable

NASTY = st.text(
    st.characters() | st.sampled_from("\x1b\x07\x08\r\n\t\x7f\x85\x9b\u202e\u2066\u2028\u200e\ud800")
)
CONTROL = {
    *map(chr, range(32)),
    *map(chr, range(127, 160)),
    *"\u202a\u202e\u2066\u2069\u2028\u2029\u200e\u200f\ud800",
}


@given(text=NASTY)
def test_nothing_controls_a_terminal(text: str) -> None:
    assert not CONTROL & set(printable(text, lines=False))
    assert CONTROL & set(printable(text)) <= {"\n", "\t"}
    assert printable(printable(text)) == printable(text)


@given(text=st.text(st.characters(categories=["L", "N", "P", "S", "Zs", "Mn"])))
def test_letters_of_all_scripts_stay(text: str) -> None:
    assert printable(text) == text
    assert printable("👩‍👩‍👧 می‌خواهم") == "👩‍👩‍👧 می‌خواهم"


def test_colours_of_tables_stay_and_nothing_else() -> None:
    table = "\x1b[1;32mready\x1b[0m \x1b[2J\x1b]0;title\x07"
    assert printable(table, colours=True) == "\x1b[1;32mready\x1b[0m \\x1b[2J\\x1b]0;title\\x07"


@given(value=st.recursive(NASTY, lambda inner: st.lists(inner) | st.dictionaries(NASTY, inner)))
def test_json_says_the_same(value: Any) -> None:
    for options in ({}, {"indent": 2}):
        text = json_text(value, **options)
        assert json.loads(text) == value
        assert CONTROL & set(text) <= {"\n"}


@given(text=NASTY)
def test_a_record_of_a_log_is_one_line(text: str) -> None:
    for formatter in (PrintableFormatter("%(name)s %(message)s"), JsonFormatter()):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        handler.emit(logging.makeLogRecord({"name": "pipeline", "msg": "said %s", "args": (text,)}))
        line = stream.getvalue()
        assert line.endswith("\n")
        assert not CONTROL & set(line[:-1])
