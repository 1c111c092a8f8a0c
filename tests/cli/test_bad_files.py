"""Files that are not what they should be, met by the commands: one message that names them, and exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import resources
from tests.cli.conftest import Run

CHECKPOINT = resources.folder("recipes") / "checkpoints" / "support-draft"


class Commands:
    """A store, and a recipe of one local checkpoint."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.checkpoint = folder / "model"
        shutil.copytree(CHECKPOINT, self.checkpoint)
        self.store = folder / "store"
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(
            f"name: r\nmodel: {{source: 'local:{self.checkpoint}'}}\nruntime: {{kind: cpu, threads: 1}}\n"
            "limits: {max_input_tokens: 64, max_output_tokens: 16, max_concurrency: 2}\n"
        )
        self.run = run

    def refused(self, *arguments: str) -> str:
        """The one message of a command that is given something wrong."""
        ended = self.run(*arguments)
        assert ended.code == 2, (ended.out, ended.err)
        before, name, message = ended.err.rpartition("pipeline: ")
        assert name
        assert name not in before
        return message


@pytest.fixture
def commands(tmp_path: Path, run: Run) -> Commands:
    return Commands(tmp_path, run)


def test_a_missing_folder_and_an_unknown_gpu_are_told_together(commands: Commands) -> None:
    shutil.rmtree(commands.checkpoint)
    commands.recipe.write_text(
        commands.recipe.read_text().replace(
            "{kind: cpu, threads: 1}", "{kind: pytorch, version: 1.2.1, gpu: h100}"
        )
    )
    for verb in ("plan", "build"):
        message = commands.refused(verb, str(commands.recipe))
        assert "recipe.yaml: 2 faults" in message
        assert "there is no such folder [source.files]" in message
        assert message.count("GPU h100 is not known; near: h100-sxm-80g") == 1


def test_nothing_hangs_on_a_pipe_or_leaves_the_folder(commands: Commands) -> None:
    """A config.json that is a named pipe: today's commands wait for somebody who writes into it, for ever."""
    for name in ("config.json", "tokenizer_config.json"):
        (commands.checkpoint / name).unlink(missing_ok=True)
        os.mkfifo(commands.checkpoint / name)
    (commands.checkpoint / "tokenizer.json").unlink()
    (commands.checkpoint / "tokenizer.json").symlink_to("/etc/hostname")
    recipe = str(commands.recipe)
    for verb in (
        ["plan", recipe],
        ["build", recipe],
        ["build", recipe, "--dry-run"],
        ["serve", recipe, "--build"],
    ):
        told = commands.refused(*verb)
        for name in ("config.json", "tokenizer_config.json"):
            assert f"model/{name}: is a named pipe, not a regular file" in told
        assert "model/tokenizer.json: is a link to /etc/hostname, outside of the folder" in told
    commands.run("recipes", "validate", recipe)
    commands.run("doctor", recipe)
    assert not (commands.store / "artifacts").exists()


def safetensors(header: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(64)


def tokenizer(**changed: object) -> bytes:
    content = json.loads((CHECKPOINT / "tokenizer.json").read_text("utf-8"))
    model = content["model"]
    for name, value in changed.items():
        if name in model:
            model[name] = value
        else:
            content[name] = value
    return json.dumps(content).encode()


TENSOR = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
CONFIG = json.loads((CHECKPOINT / "config.json").read_text("utf-8"))
ODD_SHAPE = json.dumps({"a": TENSOR | {"shape": ["2"]}}).encode()
DAMAGED = {
    "weights, header is a list": ("model.safetensors", safetensors(b"[1, 2]"), "is not an object, but a list"),
    "weights, header is deep": ("model.safetensors", safetensors(b'{"a":' * 9999), "is nested too deeply"),
    "weights, header is no text": ("model.safetensors", safetensors(b"\xff\xff{}"), "is not UTF-8: byte 0xff"),
    "weights, shape is a text": (
        "model.safetensors", safetensors(ODD_SHAPE), "'a' is not described"),
    "weights, header of exabytes": ("model.safetensors", safetensors(b"{}", 1 << 62), "is not a safetensors file"),
    "config, deep": ("config.json", b'{"a":' * 9999, "config.json: is nested too deeply"),
    "config, not UTF-8": ("config.json", b'{\n"a": "\xff"}', "config.json:2: is not UTF-8: byte 0xff"),
    "config, half a character": ("config.json", rb'{"a": "\ud83d"}', r"holds \ud83d, which is half of a character"),
    "config, a model of a billion layers": (
        "config.json", json.dumps(CONFIG | {"num_hidden_layers": 10**9}).encode(), "num_hidden_layers = 1000000000"),
    "config, a number is a text": (
        "config.json", json.dumps(CONFIG | {"rms_norm_eps": "x"}).encode(),
        "rms_norm_eps = x: is of another kind than it should be"),
    "tokenizer, not JSON": ("tokenizer.json", b"<html>", "tokenizer.json: is damaged: Cannot instantiate"),
    "tokenizer, merges of other words": (
        "tokenizer.json", tokenizer(merges=[["zzq", "qqz"]]), "Token `zzq` out of vocabulary"),
    "tokenizer, the library panics on reading": (
        "tokenizer.json", tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "is damaged"),
    "tokenizer, the library panics on encoding": (
        "tokenizer.json",
        tokenizer(post_processor={"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                  "single": [{"SpecialToken": {"id": "nope", "type_id": 0}}]}),
        "is damaged: no entry found for key"),
    "tokens that end an answer": (
        "generation_config.json", b'{"eos_token_id": ["x"]}', "eos_token_id = ['x']: must be ids of tokens"),
    "tokenizer's settings": ("tokenizer_config.json", b"[]", "tokenizer_config.json: is not an object, but a list"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_checkpoint(commands: Commands, damage: str) -> None:
    name, content, message = DAMAGED[damage]
    (commands.checkpoint / name).write_bytes(content)
    told = commands.refused("build", str(commands.recipe))
    assert name in told
    assert message in told
    assert len(told.splitlines()) < 6


LINES = {
    "not UTF-8": (b"ok\n\xff\xfe\n", ":2: is not UTF-8: byte 0xff"),
    "half a character": (
        b'ok\n{"prompt": "\\ud83d", "question": "\\ud83d", "a": "\\ud83d"}',
        r"holds \ud83d",
    ),
    "deep": (b'ok\n{"prompt":' + b"[" * 99999, "is nested too deeply"),
}


@pytest.mark.parametrize("fault", LINES)
@pytest.mark.parametrize(
    "verb",
    [
        ("generate", "--url", "127.0.0.1:1", "--raw", "--input"),
        ("cache", "tune", "--embedder", "/tmp", "--log"),
        ("cache", "tune", "--embedder", "/tmp", "--pairs"),
    ],
    ids=lambda verb: verb[-1],
)
def test_lines_of_json(commands: Commands, tmp_path: Path, verb: tuple[str, ...], fault: str) -> None:
    content, message = LINES[fault]
    (tmp_path / "lines.jsonl").write_bytes(content)
    assert message in commands.refused(*verb, str(tmp_path / "lines.jsonl"))


@pytest.mark.parametrize("limit_kib", [100, 800])
def test_a_limit_on_the_size_of_files(commands: Commands, limit_kib: int) -> None:
    """The checkpoint is larger, or the engine, which OpenVINO writes: its own error has no reason."""
    if limit_kib == 800:
        assert commands.run("build", str(commands.recipe), "--until", "fetch.target").code == 0
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -f {limit_kib}; exec {sys.executable} -m pipeline.cli.main build {commands.recipe}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    stage = "fetch" if limit_kib == 100 else "build"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"pipeline: {stage}-" in done.stderr
    assert "no file may become so large" in done.stderr
    assert "raise the limit of this process (ulimit -f)" in done.stderr
    kept = {path.name.partition("-")[0] for path in (commands.store / "artifacts").iterdir()}
    assert kept == ({"fetch"} if stage == "build" else set())
