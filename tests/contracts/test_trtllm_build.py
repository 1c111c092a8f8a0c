"""The command line of trtllm-build: sound data, and flags that are taken as Python's argparse takes them."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.releases import releases
from pipeline.contracts.trtllm_build import (
    alike,
    argv_of,
    check,
    data,
    decided,
    entries_of,
    flags,
    named_flags,
    parse,
    tunable,
    versions,
)
from pipeline.errors import UserError
from tests.support.trtllm_build import parser


def test_it_knows_the_releases_that_have_it() -> None:
    assert versions() == tuple(release.version for release in releases() if "tensorrt" in release.tracks)


@pytest.mark.parametrize("version", ["0.21.0", "1.3.0"])
def test_an_unknown_version(version: str) -> None:
    with pytest.raises(UserError, match=rf"{version} is not (known; near: |supported; the oldest is )\d"):
        flags(version)


@pytest.mark.parametrize("version", versions())
def test_flags_are_sound(version: str) -> None:
    known = flags(version)
    names = [name for flag in known.values() for name in (flag.name, *flag.aliases)]
    assert len(names) == len(set(names))
    for flag in known.values():
        assert flag.default is None or not flag.choices or flag.default in flag.choices
        assert bool(flag.choices) == (flag.kind in ("choice", "toggle"))
    for message in data()["messages"]:
        assert set(message.get("changes", ())) <= known.keys()


@pytest.mark.parametrize("version", versions())
def test_what_a_recipe_may_say(version: str) -> None:
    """Nothing that decides what an engine can do, and nothing that config.json does not tell; all else has a reason."""
    assert tunable(version) == tuple(data()["tunable"]["names"])
    assert sorted([*tunable(version), *decided(version)]) == sorted(flags(version)), (
        "each in one of the lists"
    )
    for name in tunable(version):
        assert flags(version)[name].config is not None
        assert not name.startswith(
            ("max_", "kv_", "use_paged", "use_fp8", "speculative", "tokens", "context", "gather")
        )


@pytest.mark.parametrize("version", versions())
def test_a_recipe_can_say_every_flag_that_it_may(version: str) -> None:
    entries = [entry for name in tunable(version) for entry in entries_of(flags(version)[name])]
    assert {flags(version)[entry.partition("=")[0]].kind for entry in entries} == {
        "integer", "choice", "toggle", "switch",
    }  # fmt: skip
    for entry in entries:
        name, _, value = entry.partition("=")
        assert check(version, argv_of(entry)) == []
        read = parser(version).parse_args(argv_of(entry))
        assert str(getattr(read, name)) == (value or "True")


def test_what_differs_between_versions() -> None:
    def only(version: str, other: str) -> set[str]:
        return flags(version).keys() - flags(other).keys()

    assert only("1.1.0", "1.2.0") == {"auto_parallel", "gpus_per_node", "cluster_key"}
    assert only("1.2.1", "1.0.0") == set()


def test_all_faults_at_once() -> None:
    argv = [
        *("--max_batch_size", "many"),
        *("--max_sequence", "5"),
        "--max_input_len",
        "--context_fmha=on",
        "--fast_build=yes",
        *("--max", "left"),
        *("--workers", "1", "2"),
        "--gemm_plugin",
    ]
    assert check("1.2.1", argv) == [
        "--max_batch_size many: must be a whole number",
        "--max_sequence: no such flag in 1.2.1",
        "--max_input_len: needs a value",
        "--context_fmha on: must be one of enable, disable",
        "--fast_build yes: takes no value",
        "--max: no such flag in 1.2.1",
        "--workers 1 2: takes one value",
        "--gemm_plugin: needs a value",
    ]


def test_values() -> None:
    argv = [
        "--max_decoder_seq_len=100",
        "--fast_build",
        "--lora_dir",
        "a",
        "b",
        "--workers",
        "2",
        "--workers",
        "3",
    ]
    values = parse("1.2.1", argv)
    assert values["max_seq_len"] == 100
    assert values["fast_build"] is True
    assert values["strip_plan"] is False
    assert values["lora_dir"] == ("a", "b")
    assert values["workers"] == 3
    assert values["max_num_tokens"] == 8192
    assert values["gemm_plugin"] is None
    assert named_flags("1.2.1", argv) == {"max_seq_len", "fast_build", "lora_dir", "workers"}


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("paged", "PAGED", True), ("CONTINUOUS", "PAGED", False), ("bfloat16", "auto", True),
        ("float16", "auto", False), (None, None, True), ("fp8", None, False), (1, True, False), (32, 32, True),
    ],
)  # fmt: skip
def test_values_that_releases_spell_in_their_own_way(found: Any, wanted: Any, same: bool) -> None:
    assert alike(found, wanted, "bfloat16") is same


names = st.sampled_from(
    [f"--{name}" for flag in flags("1.1.0").values() for name in (flag.name, *flag.aliases)]
)
values_ = st.sampled_from(
    ["enable", "disable", "auto", "fp8", "paged", "8", "-5", "1.5", "none", "hf", "float32"]
)
arguments = st.one_of(
    names.map(lambda name: [name]),
    st.tuples(names, values_).map(list),
    st.tuples(names, values_).map(lambda pair: ["=".join(pair)]),
    st.just(["--no_such_flag"]),
)


@given(parts=st.lists(arguments, max_size=4))
@settings(max_examples=200)
def test_it_takes_what_argparse_takes(parts: list[list[str]]) -> None:
    argv = [word for part in parts for word in part]
    refused = ""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        try:
            parsed = parser("1.1.0").parse_args(argv)
        except SystemExit:
            refused = shown.getvalue()
    faults = check("1.1.0", argv)
    assert bool(faults) == bool(refused), (faults, refused)
    if not refused:
        found = {
            name: tuple(value) if isinstance(value, list) else value for name, value in vars(parsed).items()
        }
        assert parse("1.1.0", argv) == found
