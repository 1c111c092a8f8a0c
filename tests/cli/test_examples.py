"""Every example in the help of a command is parsed, and run as far as an empty store lets it.

An example may end for want of something that only a built, served or remote model has. It never ends with a wrong
option, a recipe that is refused, or a traceback.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.main import COMMANDS, cli
from pipeline.prepare import check_recipe
from pipeline.recipe import load_recipe, packaged
from pipeline.recipe.catalog import copy_recipe
from pipeline.triton.deployment import LaunchSpec
from tests.support import CHECKPOINTS
from tests.support.deployments import gpu_deployment

FOLDERS = (
    "my-model", "package", "tokenizer", "deployment", "models/tiny-cpu-2", "srv/package-1", "srv/package-2",
    "llama-3.1-8b-fp8-engines/target", "package-42e451333aac24b05b44", "llama-3.1-8b-fp8-tune",
)  # fmt: skip
FILES = {
    "questions.jsonl": '{"prompt": "Hi"}\n', "log.jsonl": "Hi\n", "mine.jsonl": "Hi\n", "keys.yaml": "keys: []\n",
    "chat.yaml": "rate: 4\n", "release.yaml": "min_similar: 0.9\n",
    "before.json": "{}", "after.json": "{}", "bench-1.json": "{}", "bench-2.json": "{}", "packages.key": "",
    "pairs.jsonl": '{"a": "Hi", "b": "Hello", "same": 1}\n', "accept-llama-3.1-8b-fp8-2026-11-30.json": "{}",
}  # fmt: skip
HOSTS = re.compile(r"^(http://)?(?:gpu-host:80[08][01]|gpu:8000|triton:8001)")
# What makes a command stop before it acts.
HOLD_BACK = {
    "build": ("--dry-run",), "tune": ("--dry-run",), "accept": ("--dry-run",),
    "serve": ("--dry-run",), "rollout": ("--dry-run",), "top": ("--interval", "0.1"),
    "doctor": ("--timeout-s", "1"),
}  # fmt: skip
# They would run until they are ended, ask an object store, or compute for long what other tests show.
PARSED_ONLY = ("gateway --package", "store pull", "plan accuracy", "plan compare", "store push", "store sign")
LACKING = re.compile(
    r"is not running|not running here|is not built|is not served here|no such deployment|has no such log"
    r"|no answer from \S+: |cannot be reached|no response cache here yet|config\.json: cannot be read"
    r"|offline, the default branch|sizes are not among those that are known|chat-fp8: is neither a packaged recipe"
    r"|recipes are runnable here"
    r"|(before|bench-1)\.json: |srv/package-1: |accept-\S+\.json: |(-tune|/target|05b44|pairs\.jsonl|log\.jsonl)\b.*: "
)


def examples(group: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each example, without `pipeline` and without what a shell does with it."""
    for line in (group.help or "").splitlines():
        for part in re.split(r"[;|>]", line) if line.strip().startswith("pipeline ") else ():
            words = shlex.split(part) if part.strip().startswith("pipeline ") else []
            if words:
                yield tuple(words[1:])
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield from examples(command, (*path, name))


EXAMPLES = sorted({shlex.join(words) for words in examples()})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that examples name."""
    made = tmp_path_factory.mktemp("examples")
    for name in FOLDERS:
        (made / name).mkdir(parents=True)
    for name, text in FILES.items():
        (made / name).write_text(text)
    with chdir(made):
        for name in ("my.yaml", "other.yaml"):
            copy_recipe(packaged()["tiny-cpu"], name, force=False)
        copy_recipe(packaged()["llama-3.1-8b-fp8"], "engines.yaml", force=False)
    (made / "checkpoints").symlink_to(CHECKPOINTS)
    for pattern in ("tokenizer*", "chat_template*"):
        for file in (CHECKPOINTS / "support-target").glob(pattern):
            shutil.copy(file, made / "tokenizer")
    launch = LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=1)
    for name in ("package", "deployment", "models/tiny-cpu-2"):
        gpu_deployment(launch).save(made / name)
    return made


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for each example, beside an empty store."""
    shutil.copytree(prepared, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def placed(line: str) -> list[str]:
    """The words of an example, with nothing outside this folder and this machine."""
    return [HOSTS.sub(r"\g<1>127.0.0.1:1", word.removeprefix("/")) for word in shlex.split(line)]


def parsed(words: list[str]) -> click.Context:
    """Parse words as click does, callbacks of options included."""
    command: click.Command = cli
    context = click.Context(cli, info_name="pipeline")
    while isinstance(command, click.Group) and words[0] in command.list_commands(context):
        inner = command.get_command(context, words[0])
        assert inner is not None, f"no command {words[0]}"
        command, words = inner, words[1:]
    return command.make_context(command.name, words, parent=context)


def test_examples_are_found() -> None:
    with_examples = {shlex.split(line)[0] for line in EXAMPLES}
    assert set(COMMANDS) - with_examples == set()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "line", [line for line in EXAMPLES if any(command in line for command in PARSED_ONLY)]
)
def test_an_example_is_parsed_and_its_recipe_is_valid(line: str) -> None:
    with parsed(placed(line)) as context:
        given = context.params.get("recipes") or [context.params.get("recipe")]
        words = [*(context.params.get("words") or ()), *given]
        for name in words:
            if name in packaged() or str(name).endswith(".yaml"):
                check_recipe(load_recipe(name, context.params.get("overrides") or ()))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "line", [line for line in EXAMPLES if not any(command in line for command in PARSED_ONLY)]
)
def test_an_example_runs_as_far_as_an_empty_store_lets_it(line: str) -> None:
    words = placed(line)
    if words[:2] == ["recipes", "copy"]:
        words.append("--force")
    words += [word for word in HOLD_BACK.get(words[0], ()) if word not in words]
    done = CliRunner().invoke(cli, words)
    said = f"{done.output}\n{'' if done.exception is None else done.exception}"
    assert "Usage:" not in done.output, said
    # What the SLO of a recipe is missed by is a result, too.
    fine = (0, 4) if words[0] == "plan" else (0,)
    assert done.exit_code in fine or LACKING.search(said), f"{said}\n{done.exception!r}"
