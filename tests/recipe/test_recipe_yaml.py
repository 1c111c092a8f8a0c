"""The form of the file: what is no YAML, what is no recipe, and the traps of YAML 1.1."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.documents import dump_yaml, read_document
from pipeline.recipe import Recipe

Load = Callable[..., Recipe]
Faults = Callable[..., list[str]]

CASES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "r.yaml:1: is empty (start from an example: pipeline recipes copy tiny-cpu my.yaml)"),
    "comments only": ("# a\n\n# b\n", "r.yaml:1: is empty (start from an"),
    "list": ("# a\n- name: x\n", "r.yaml:2: is a list, not a mapping of keys (start from an example"),
    "text": ("hello", "r.yaml:1: is one text, not a mapping of keys"),
    "tab": ("name: x\nmodel:\n\tsource: local:x\n", "r.yaml:3: is indented with a tab (indent with spaces)"),
    "open bracket": ("name: x\nmodel: {source: local:x\n", "r.yaml:3: is not YAML: expected ',' or '}'"),
    "bad indentation": ("name: x\n  model: 3\n", "r.yaml:2: is not YAML: mapping values are not allowed here (text"),
    "colon in text": ("name: a: b\n",
        'r.yaml:1: is not YAML: mapping values are not allowed here (text that holds ": "'),
    "no colon": ("name: x\nmodel\nlimits: {}\n", "r.yaml:3: is not YAML: could not find expected ':'"),
    "at sign": ("name: @x\n", "r.yaml:1: is not YAML: found character '@' that cannot start any token (a value"),
    "two documents": ("name: x\n---\nname: y\n", "r.yaml:2: is not YAML: found another document (a file holds"),
    "unknown alias": ("name: *x\n", "r.yaml:1: is not YAML: found undefined alias 'x' (define the anchor"),
    "not UTF-8": ("name: x\n# caf\xe9\n".encode("latin-1"), "r.yaml:2: is not UTF-8 text (save it as UTF-8)"),
    "UTF-16": ("name: x\n".encode("utf-16"), "r.yaml:1: is not UTF-8 text (save it as UTF-8)"),
    "control character": ("name: x\nmodel: \x07\n", "r.yaml:2: holds the control character #x07 (remove it)"),
    "nested too deeply": ("a: " + "[" * 5000 + "]" * 5000, "r.yaml:1: is nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), CASES.values(), ids=CASES)
def test_file_that_is_no_recipe(faults: Faults, text: str | bytes, message: str) -> None:
    (found,) = faults(text)
    assert found.startswith(message)


FORM = {
    "twice": ("name: again\n", "r.yaml:10: name: stands twice; first on line 1 (remove one)"),
    "twice inside": ("slo: {ttft_p95_ms: 1,\n  ttft_p95_ms: 2}\n",
        "r.yaml:11: slo.ttft_p95_ms: stands twice; first on line 10 (remove one)"),
    "key that is a number": ("slo: {1: 2}\n", "r.yaml:10: slo: has a key that is not text: 1"),
    "key that is empty": ("slo: {~: 2}\n", "r.yaml:10: slo: has a key that is not text: ~"),
    "key that is a list": ("slo: {[a]: 2}\n", "r.yaml:10: slo: has a key that is not text: a list or mapping"),
    "tag": ("slo: {ttft_p95_ms: !duration 5}\n",
        "r.yaml:10: slo.ttft_p95_ms: has a tag that means nothing here: !duration"),
    "python tag": ("slo: !!python/object/apply:os.system [ls]\n",
        "r.yaml:10: slo: has a tag that means nothing here: !!python/object/apply:os.system"),
    "wrong tag": ("slo: {ttft_p95_ms: !!int many}\n", "r.yaml:10: slo.ttft_p95_ms: is not int: many"),
    "alias of itself": ("slo: &a {ttft_p95_ms: *a}\n",
        "r.yaml:10: slo.ttft_p95_ms: contains itself through an alias"),
    "half a character": ('slo: {"\\udfff": 2}\n',
        r"r.yaml:10: slo: holds \udfff, which is half of a character: write both halves, or none"),
    "merge of a number": ("slo: {<<: 3}\n", "r.yaml:10: slo: merges (<<) something that is not a mapping"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FORM.values(), ids=FORM)
def test_fault_of_form(faults: Faults, small: str, text: str, message: str) -> None:
    assert message in faults(small + text)


@pytest.mark.parametrize("depth", [52, 100, 200, 300, 400])
def test_nested_too_deeply(faults: Faults, small: str, depth: int) -> None:
    (message,) = [m for m in faults(f"{small}slo: {'[' * depth}{']' * depth}\n") if "nested" in m]
    assert message in ("r.yaml:10: slo[0][0]: is nested too deeply", "r.yaml:1: is nested too deeply")


def test_faults_of_form_come_with_all_others(faults: Faults, small: str) -> None:
    found = faults(small + "name: again\nslo: {ttft: 1}\n")
    assert [message.split(" ")[1] for message in found] == ["name:", "slo.ttft"]


def test_aliases_cannot_blow_up(faults: Faults, small: str) -> None:
    bomb = "slo:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert any("holds more than 10000 values" in message for message in faults(small + bomb))


def test_anchors_and_merge_keys(load: Load, small: str) -> None:
    text = small + "slo: &slo {ttft_p95_ms: 5}\ncache: {ttl_s: 9, backend: {kind: sqlite}}\n"
    assert load(text).slo.ttft_p95_ms == 5
    merged = load(small.replace("model:\n", "model: &m\n") + "draft: {<<: *m, max_draft_tokens: 2}\n")
    assert merged.draft is not None
    assert merged.draft.source == merged.model.source
    own = load(
        small.replace("model:\n", "model: &m\n") + "draft: {source: hf:a/b, <<: [*m], max_draft_tokens: 2}\n"
    )
    assert own.draft is not None
    assert own.draft.source.kind == "hf"


def test_a_fault_in_a_merged_value_stands_where_it_was_written(faults: Faults, small: str) -> None:
    text = small.replace("local:target", "local:target\n  allow_pickle: 3").replace("model:", "model: &m")
    assert faults(text + "draft: {<<: *m, max_draft_tokens: 2}\n") == [
        "r.yaml:4: model.allow_pickle = 3: must be true or false",
        "r.yaml:4: draft.allow_pickle = 3: must be true or false",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1.5E+2", 150.0), (".5", 0.5), ("5.", 5.0), ("-0", 0), ("0x1F", 31), ("0o17", 15),
        ("017", 17), ("on", "on"), ("No", "No"), ("y", "y"), ("true", True), ("FALSE", False), ("~", None), ("", None),
        ("null", None), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("1.2.1", "1.2.1"),
        ("=", "="), ("'1'", "1"), ('"true"', "true"), ("!!str 1", "1"), ("!!float 1", 1.0), ("hf:a/b", "hf:a/b"),
        ("é🎈", "é🎈"), ("9" * 5000, "9" * 5000), ("nan", "nan"), ("1e5x", "1e5x"), ("-", "-"),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    document = read_document(f"key: {text}\n".encode(), "r.yaml")
    if text != "-":
        assert document.data == {"key": value}
        assert type(document.data["key"]) is type(value)
        assert read_document(dump_yaml({"key": value}).encode(), "r.yaml").data == {"key": value}


def test_byte_order_mark_and_windows_line_ends(load: Load, faults: Faults, small: str) -> None:
    assert load(b"\xef\xbb\xbf" + small.replace("\n", "\r\n").encode()).name == "small"
    (message,) = faults(small.replace("kind: cpu", "kind: x").replace("\n", "\r\n"))
    assert message.startswith("r.yaml:5: ")


def test_file_that_is_too_large(faults: Faults) -> None:
    (message,) = faults("x" * (2 << 20))
    assert message == "r.yaml: is larger than 1 MiB, so it is not a recipe"
