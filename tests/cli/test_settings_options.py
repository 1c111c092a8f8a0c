"""Options that are made from a settings model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import DirectoryPath, Field, field_validator

from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault, InvalidInput
from pipeline.settings import Option, Settings


class Front(Settings):
    host: str = Field("127.0.0.1", description="Address to listen on.")
    allowed_hosts: Annotated[tuple[str, ...], Option("--allowed-host", metavar="NAME")] = Field(
        (), description="Host that requests may name."
    )
    workers: int = Field(1, ge=1, description="Processes.")
    slots: int | None = Field(None, ge=1, description="Slots.")
    wait_s: float = Field(30.0, gt=0, description="Time to wait.")
    log: Literal["text", "json"] = Field("text", description="Format.")
    folder: DirectoryPath | None = Field(None, description="Folder.")
    quick: bool = Field(default=False, description="Be quick.")
    container: Annotated[bool | None, Option("--container/--no-container")] = Field(
        None, description="Where."
    )
    rates: Annotated[tuple[float, ...], Option("--rate", separator=",", metavar="R[,R…]")] = Field(
        (), description="Rates."
    )
    size: Annotated[int, Option(parse=lambda text: int(text.removesuffix("k")) * 1000, envvar="SIZE")] = (
        Field(1000, description="Size.")
    )

    @field_validator("host")
    @classmethod
    def _host(cls, host: str) -> str:
        if "/" in host:
            raise ValueError("is not a host")
        return host


class Other(Settings):
    depth: int = Field(3, description="Depth.")


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[Front, Other]:
    got: list[tuple[Front, Other]] = []

    @click.command()
    @options_of(Front, "front")
    @options_of(Other, "other")
    def command(front: Front, other: Other) -> None:
        got.append((front, other))

    result = CliRunner().invoke(command, arguments, env=env, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return got[0]


def test_what_is_given_is_set_and_the_rest_is_default(tmp_path: Path) -> None:
    front, other = run(
        "--allowed-host", "a", "--allowed-host", "b", "--slots", "4", "--folder", str(tmp_path), "--no-container",
        "--rate", "1,2.5", "--quick", "--depth", "5", env={"SIZE": "7k"},
    )  # fmt: skip
    assert front == Front(
        allowed_hosts=("a", "b"),
        slots=4,
        folder=tmp_path,
        container=False,
        rates=(1.0, 2.5),
        quick=True,
        size=7000,
    )
    assert other.depth == 5
    assert front.model_fields_set == {
        "allowed_hosts", "slots", "folder", "container", "rates", "quick", "size",
    }  # fmt: skip
    assert run() == (Front(), Other())
    assert run()[0].model_fields_set == set()


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        run(
            "--workers",
            "0",
            "--slots",
            "x",
            "--wait-s",
            "0",
            "--host",
            "a/b",
            "--rate",
            "1,z",
            "--size",
            "many",
        )
    told = {fault.key: fault.problem for fault in caught.value.faults}
    assert told["--workers"] == "must be a whole number of at least 1"
    assert told["--slots"] == "must be a whole number of at least 1"
    assert told["--wait-s"] == "must be a number above 0"
    assert told["--host"] == "is not a host"
    assert set(told) == {"--workers", "--slots", "--wait-s", "--host", "--rate", "--size"}


def test_help_is_the_descriptions_with_ranges_and_defaults() -> None:
    command = click.command()(options_of(Front)(lambda **_: None))
    text = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=200).output.split())
    assert "--allowed-host NAME Host that requests may name." in text
    assert "--workers INTEGER RANGE Processes. [default: 1; x>=1]" in text
    assert "--wait-s FLOAT RANGE Time to wait. [default: 30.0; x>0]" in text
    assert "--log [text|json] Format. [default: text]" in text
    assert "--container / --no-container Where." in text
    assert "[env var: SIZE; default: 1000]" in text


def test_a_child_process_gets_the_same_settings() -> None:
    front, _ = run("--rate", "3", "--folder", "/")
    assert Front.from_descriptor(front.to_descriptor()) == front


class Part(Settings):
    alternatives = ("source", "url")

    url: str = Field("", description="Address.")
    sizes: tuple[int, ...] = Field((), description="Sizes.")
    depth: int = Field(1, ge=1, description="Depth.")
    source: Path | Literal["none"] = Field("none", description="Source.")

    def conflicts(self) -> Iterator[Fault]:
        if self.depth > len(self.sizes):
            yield Fault("is more than there are sizes", key="depth")


class Whole(Settings):
    part: Part = Field(Part(), description="Part.")


def whole(*arguments: str) -> Whole:
    got: list[Whole] = []
    command = click.command()(options_of(Whole)(lambda settings: got.append(settings)))
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return got[0]


def test_a_model_is_one_option_of_a_file_and_of_keys_that_replace_it(tmp_path: Path) -> None:
    file = tmp_path / "part.yaml"
    file.write_text("sizes: [1, 2, 3]\ndepth: 2\nsource: there.txt\n")
    made = whole("--part", "depth=3", "--part", str(file)).part
    assert made == Part(sizes=(1, 2, 3), depth=3, source=tmp_path / "there.txt")
    assert whole("--part", str(file), "--part", "source=none").part.source == "none"
    other = whole("--part", str(file), "--part", "url=http://a").part
    assert (other.source, other.url) == ("none", "http://a"), (
        "one of two that exclude each other replaces the other"
    )
    assert whole() == Whole()
    assert whole("--part", "sizes=[4]").part.model_fields_set == {"sizes"}


def test_all_faults_of_a_file_and_of_keys_have_their_places(tmp_path: Path) -> None:
    file = tmp_path / "part.yaml"
    file.write_text("sizes: [1, x]\ndepht: 2\n")
    with pytest.raises(InvalidInput) as caught:
        whole("--part", str(file), "--part", "depth=0", "--part", str(tmp_path / "none.yaml"))
    text = str(caught.value)
    for fault in (
        f"{file}:1: sizes[1] = x",
        f"{file}:2: depht",
        "did you mean depth",
        "--part: depth = 0: must be",
    ):
        assert fault in text
    assert "none.yaml: cannot be read" in text
    with pytest.raises(InvalidInput, match="--part: depth: is more than there are sizes"):
        whole("--part", "depth=2")
