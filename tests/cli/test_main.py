"""What all commands share: the help, what it imports, near names, completion, and the common options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import pipeline.cli
from pipeline.cli.main import COMMANDS, cli
from pipeline.cli.output import note, print_columns, reporter, short_path
from pipeline.progress import Lines, Silent

FOLDER = Path(pipeline.cli.__file__).parent


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return result.output


def complete(*words: str) -> list[str]:
    completion = ShellComplete(cli, {}, "pipeline", "_PIPELINE_COMPLETE")
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


def test_the_help_names_every_command_in_whole_sentences() -> None:
    modules = {
        file.stem
        for file in FOLDER.glob("*.py")
        if "\n@click." in file.read_text() and "\ndef command(" in file.read_text()
    }
    assert set(COMMANDS) == modules
    shown = " ".join(run("--help").split())
    for name, summary in COMMANDS.items():
        assert summary.endswith(".")
        assert f"{name} {summary}" in shown


def test_the_help_of_a_command_has_sections() -> None:
    shown = run("serve", "--help")
    titles = ["Recipe and build:", "Options:", "Output:", "Options of all commands:"]
    assert [line for line in shown.splitlines() if line in titles] == titles
    own, common = shown.split("Options of all commands:")
    assert "--keys FILE" in own
    assert "--store FOLDER" in common
    assert "whoever copies its folder." in " ".join(run("store", "--help").split())


def test_the_help_and_the_completion_of_a_command_import_no_command() -> None:
    code = """
import sys
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from pipeline.cli.main import cli
assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
assert ShellComplete(cli, {}, "pipeline", "X").get_completions([], "b")
light = {"pipeline", "pipeline.cli", "pipeline.cli.main", "pipeline.cli.output", "pipeline.errors"}
light |= {"pipeline.cli.options", "pipeline.printable"}
print(sorted({name for name in sys.modules if name.startswith("pipeline")} - light))
print([name for name in ("numpy", "pydantic", "rich", "tritonclient", "yaml") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split("\n") == ["[]", "[]", ""]


def test_a_name_that_is_near() -> None:
    result = CliRunner().invoke(cli, ["biuld"])
    assert result.exit_code == 2
    assert "no command biuld; did you mean build?" in result.output
    assert "no command nonesuch\n" in CliRunner().invoke(cli, ["nonesuch"]).output


def test_completion() -> None:
    assert complete("re") == ["recipes"]
    assert complete("build", "tiny-c") == ["tiny-cpu", "tiny-c"]
    assert complete("recipes", "show", "tiny-c") == ["tiny-cpu", "tiny-c"]
    assert complete("store", "l") == ["ls"]
    assert "--no-color" in complete("build", "--no")


@pytest.mark.parametrize("words", [("--quiet", "store", "ls"), ("store", "ls", "-q")])
def test_quiet(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "0 artifacts" in run("store", "ls", "--store", str(tmp_path))
    assert run(*words, "--store", str(tmp_path)) == ""


@pytest.mark.parametrize(("words", "value"), [((), "1"), (("--no-color",), "")])
def test_no_color(words: tuple[str, ...], value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    colored = CliRunner().invoke(cli, [*words, "doctor", "tiny-cpu", "--timeout-s", "0.1"], color=True)
    assert "tiny-cpu" in colored.output
    assert "\x1b" not in colored.output


def test_paths_are_short_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert short_path(Path("/home/ada/.cache/x")) == "~/.cache/x"
    assert short_path(Path("/home/ada/s/artifacts/x"), Path("/home/ada/s")) == "artifacts/x"
    assert short_path(Path("/var/x")) == "/var/x"
    with click.Context(click.Command("x")) as context:
        context.meta["pipeline.verbose"] = True
        assert short_path(Path("/home/ada/.cache/x")) == "/home/ada/.cache/x"


def test_what_is_not_a_result_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    note("here")
    assert isinstance(reporter(), Lines)
    assert isinstance(reporter(silent=True), Silent)
    with click.Context(click.Command("x")) as context:
        context.meta["pipeline.quiet"] = True
        note("not here")
        assert isinstance(reporter(), Silent)
    print_columns([("A", "LONG"), ("wide", "x")])
    assert capsys.readouterr() == ("A     LONG\nwide  x\n", "here\n")
