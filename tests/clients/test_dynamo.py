"""NVIDIA Dynamo's frontend, from its wheel, in front of a package of `cpu`, by the script of `pipeline deploy`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.client import ChatTemplate, Client
from pipeline.contracts import read_facts
from pipeline.triton.deployment import Deployment
from tests.support.programs import ROOT, Program, Unavailable
from tests.support.served import package_support_pair
from tests.support.servers import free_port

QUESTION = [{"role": "user", "content": "Hi, I forgot my password, how can I reset it?"}]
# Answers of so many tokens, whatever the model would say.
LONG = {"max_tokens": 200, "ignore_eos": True}
PROBE = """
import json
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup
from dynamo.frontend.frontend_args import FrontendArgGroup
import argparse, contextlib, io
texts = {}
for name, group in (("frontend", FrontendArgGroup()), ("worker", DynamoRuntimeArgGroup())):
    parser = argparse.ArgumentParser()
    group.add_arguments(parser)
    texts[name] = parser.format_help()
print(json.dumps(texts))
"""


@dataclass(frozen=True)
class Script:
    """A running dynamo.sh."""

    process: subprocess.Popen[bytes]
    log: Path
    grpc: int

    def triton(self) -> psutil.Process:
        """The server's process."""
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if child.name() == "tritonserver"
        ]
        assert len(found) == 1, self.log.read_text("utf-8", "replace")
        return found[0]


@dataclass(frozen=True)
class Frontend:
    """Two workers, each with a Triton of its own, and one frontend."""

    port: int
    scripts: tuple[Script, Script]
    package: Path

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Complete a chat, without streaming."""
        body = {"model": "support", "messages": QUESTION, "temperature": 0} | fields
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            answer = {"status": error.code, "error": json.load(error)["message"]}
        return answer

    def stream(self, **fields: Any) -> Iterator[str]:
        """Texts of a streamed chat."""
        body = {"model": "support", "messages": QUESTION, "temperature": 0, "stream": True} | fields
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        try:
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        yield choice["delta"].get("content") or ""
        finally:
            connection.close()


@pytest.fixture(scope="module")
def ai_dynamo() -> Program:
    try:
        return Program.install("ai_dynamo")
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def frontend(ai_dynamo: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("dynamo")
    # Paths of sockets are short.
    temporary = tempfile.TemporaryDirectory(prefix="dynamo-")
    package = package_support_pair(folder / "model")
    port = free_port()
    environment = {
        **os.environ,
        "DYNAMO_PYTHON": str(ai_dynamo.command("python")),
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_HTTP_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": temporary.name,
    }
    scripts = []
    for name, roles in (("one", ()), ("two", ("worker",))):
        grpc, metrics = free_port(), free_port()
        subprocess.run(
            [
                *(sys.executable, "-m", "pipeline.cli.main", "deploy", "--package", package, "--target", "dynamo"),
                *("--set", f"triton.grpc_port={grpc}", "--set", f"triton.metrics_port={metrics}"),
                *("--output", folder / name),
            ],
            check=True, timeout=60, env=environment,
        )  # fmt: skip
        log = folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [folder / name / "dynamo.sh", *roles],
                env=environment | {"PIPELINE_STORE": str(folder / f"store-{name}")},
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        scripts.append(Script(process, log, grpc))
    running = Frontend(port, (scripts[0], scripts[1]), package)
    try:
        deadline = time.monotonic() + 180
        instances = folder / "discovery" / "v1" / "instances"
        while len(list(instances.glob("*"))) < 2 or "error" in running.ask(max_tokens=1):
            for script in scripts:
                assert script.process.poll() is None, script.log.read_text("utf-8", "replace")
            assert time.monotonic() < deadline, scripts[0].log.read_text("utf-8", "replace")
            time.sleep(0.5)
        yield running
    finally:
        for script in scripts:
            script.process.send_signal(signal.SIGTERM)
        for script in scripts:
            script.process.wait(60)
        temporary.cleanup()


@pytest.fixture(scope="module")
def answer(frontend: Frontend) -> str:
    """Answer of Triton without Dynamo."""
    template = ChatTemplate.from_directory(frontend.package / Deployment.load(frontend.package).tokenizer_dir)
    with Client(f"127.0.0.1:{frontend.scripts[0].grpc}", template=template) as client:
        return client.generate(QUESTION, max_tokens=64, temperature=0).text


def test_dynamo_says_what_the_model_says(frontend: Frontend, answer: str) -> None:
    reply = frontend.ask(max_tokens=64)
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer, "stop")
    assert reply["usage"]["completion_tokens"] == 32
    assert "".join(frontend.stream(max_tokens=64)) == answer


def test_requests_are_obeyed_or_refused_by_name(frontend: Frontend, answer: str) -> None:
    (choice,) = frontend.ask(max_tokens=6, logprobs=True, top_logprobs=2)["choices"]
    assert choice["finish_reason"] == "length"
    tokens = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert all(
        token["logprob"] == pytest.approx(token["top_logprobs"][0]["logprob"], abs=1e-6)
        and len(token["top_logprobs"]) == 2
        for token in tokens
    )
    # A stop text within a token.
    (choice,) = frontend.ask(stop=["epool"])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer.partition("epool")[0], "stop")
    (choice,) = frontend.ask(guided_choice=["yes", "no"], max_tokens=8)["choices"]
    assert choice["message"]["content"] in ("yes", "no")
    assert frontend.ask(n=2, temperature=0.7) == {
        "status": 400,
        "error": "not supported by this worker: n = 2",
    }
    assert frontend.ask(max_tokens=701)["status"] == 400
    long = [{"role": "user", "content": "password " * 300}]
    assert frontend.ask(messages=long) == {
        "status": 400,
        "error": "input_lengths = 312: prompts may have 256 tokens here",
    }


def test_a_stream_goes_on_with_the_other_worker_when_a_server_dies(frontend: Frontend) -> None:
    """Both servers answer by turns: of two streams, one is on the server that dies."""
    whole = "".join(frontend.stream(**LONG))
    streams = [frontend.stream(**LONG) for _ in range(2)]
    texts = ["".join(next(stream) for _ in range(10)) for stream in streams]
    frontend.scripts[1].triton().kill()
    assert [text + "".join(stream) for text, stream in zip(texts, streams, strict=True)] == [whole, whole]


def test_the_facts_are_those_of_the_wheel(ai_dynamo: Program) -> None:
    facts = read_facts("dynamo.yaml")
    python = ai_dynamo.command("python")
    version = ai_dynamo.call(
        [python, "-c", "from importlib.metadata import version as v; print(v('ai-dynamo'))"]
    )
    assert version.stdout.strip() == facts["version"]
    texts = json.loads(ai_dynamo.call([python, "-c", PROBE]).stdout.splitlines()[-1])
    for program, text in texts.items():
        assert [name for name in facts["variables"][program]["names"] if name not in text] == []
    (binary,) = ai_dynamo.environment.glob("lib/python*/site-packages/dynamo/_core.abi3.so")
    code = binary.read_bytes()
    for section in (facts["variables"]["runtime"], *facts["request"].values()):
        assert [name for name in section["names"] if name.encode() not in code] == []
