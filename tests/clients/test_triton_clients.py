"""Clients of Triton itself, against tiny-cpu as it is (decoupled) and packaged to answer with one response.

The examples are those of docs/how-to/triton-clients.md, run as they stand there: the page marks each with the program
that runs it, the kind of deployment, and what must be printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import Client
from pipeline.serving.served import ServedDeployment
from pipeline.store import Store
from tests.support.programs import ROOT, Program, ProgramFailed, Unavailable

PAGE = (ROOT / "docs" / "how-to" / "triton-clients.md").read_text("utf-8")
BLOCK = r"```(?P<language>\w+)\n(?P<text>.*?)```"
FILES = {
    found["name"]: found["text"]
    for found in re.finditer(rf"<!-- file: (?P<name>\S+) -->\n{BLOCK}", PAGE, re.DOTALL)
}
PROMPT = json.loads(FILES["ask.json"])["text_input"]
TOKENS = 12  # of each answer of the page
WHOLE = ("name=tiny-whole", "serving.decoupled=false", "runtime.speculation=bls")
MODEL_UNKNOWN = "Request for unknown model: 'unknown' is not found"


@dataclass(frozen=True)
class Example:
    """A block of the page."""

    program: str
    kind: str  # of the deployment: streams, whole
    prints: str
    language: str
    text: str


EXAMPLES = [
    Example(**found.groupdict())
    for found in re.finditer(
        rf"<!-- run: (?P<program>\w+) on (?P<kind>\w+): (?P<prints>.+?) -->\n{BLOCK}", PAGE, re.DOTALL
    )
]
Deployments = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def whole(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDeployment]:
    """tiny-cpu with one response to each request, and its draft as a model of its own."""
    overrides = [word for value in (*WHOLE, "serving.http=true") for word in ("--set", value)]
    words = ("tiny-cpu", "--build", "--no-gateway", *overrides, *store.argv)
    logs = tmp_path_factory.mktemp("whole")
    deployment = ServedDeployment.start(words, "tiny-whole", store.running, logs, deadline_s=600)
    try:
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture(scope="module")
def deployments(variables: dict[str, str], whole: ServedDeployment) -> Deployments:
    """Variables of the environment, by the kind of deployment."""
    record = whole.record
    return {
        "streams": variables,
        "whole": variables
        | {"TRITON_HTTP": record.http_url.removeprefix("http://"), "TRITON_GRPC": record.grpc_url},
    }


@pytest.fixture(scope="module")
def answer(deployments: Deployments) -> str:
    """What both deployments say to the page's prompt."""
    said = []
    for variables in deployments.values():
        with Client(variables["TRITON_GRPC"]) as client:
            said.append(client.generate(PROMPT, max_tokens=TOKENS).text)
    assert said[0] == said[1]
    assert said[0]
    return said[0]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What perf_analyzer wants of the machine, by the names that it wants: Triton's wheel brings it."""
    folder = tmp_path_factory.mktemp("libraries")
    wheel = next(path for path in map(Path, sys.path) if (path / "nvidia_pytriton.libs").is_dir())
    for name, pattern in {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}.items():
        (folder / name).symlink_to(next((wheel / "nvidia_pytriton.libs").glob(pattern)))
    return folder


Run = Callable[[Example], str]


@pytest.fixture
def run(program: Callable[[str], Program], deployments: Deployments, libraries: Path, tmp_path: Path) -> Run:
    """Runs an example in a folder that has the page's files; returns what it printed."""

    def run(example: Example) -> str:
        variables = deployments[example.kind]
        client = replace(program(example.program), variables=variables)
        for name, text in FILES.items():
            (tmp_path / name).write_text(text, "utf-8")
        text = example.text.replace("localhost:8000", variables["TRITON_HTTP"])
        text = text.replace("localhost:8001", variables["TRITON_GRPC"])
        for name in re.findall(r"\w+_client\.py", text):
            try:
                shutil.copy(client.file(name), tmp_path)
            except Unavailable as error:
                pytest.skip(str(error))
        if example.language == "python":
            (tmp_path / "example.py").write_text(text, "utf-8")
            text = "python -I example.py"
        path = f"{client.command('python').parent}:{os.environ['PATH']}"
        if example.program == "genai_perf":
            path = f"{program('perf_analyzer').command('perf_analyzer').parent}:{path}"
        done = client.call(
            ["bash", "-euo", "pipefail", "-c", f"cd {tmp_path}\n{text}"],
            PATH=path,
            PROMPT=PROMPT,
            LD_LIBRARY_PATH=str(libraries) if "perf" in example.program else "",
        )
        return done.stdout

    return run


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda example: f"{example.program}-{example.kind}-{example.text.split()[0]}"
)
def test_the_pages_example_runs(run: Run, answer: str, example: Example) -> None:
    assert (answer if example.prints == "the answer" else example.prints) in run(example)


def upstream(kind: str, text: str) -> Example:
    """One of TensorRT-LLM's clients."""
    return Example("inflight_batcher", kind, "", "sh", f"python {text}")


INFLIGHT = 'inflight_batcher_llm_client.py --url localhost:8001 --tokenizer-dir "$TOKENIZER" --text "$PROMPT"'
END_TO_END = "end_to_end_grpc_client.py --url localhost:8001 --prompt hello --output-len 4"


def test_upstreams_client_reads_what_an_answer_cost(run: Run) -> None:
    """Its own check of the names of outputs is among it: what was not asked for must not come."""
    outputs = "output_ids sequence_length cum_log_probs output_log_probs"
    printed = run(
        upstream(
            "whole", f"{INFLIGHT} --request-output-len 4 --return-log-probs --requested-outputs {outputs}"
        )
    )
    assert "cum_log_probs: [[" in printed
    printed = run(
        upstream(
            "whole",
            f"{INFLIGHT} --request-output-len 4 --exclude-input-in-output --return-perf-metrics "
            "--return-num-input-tokens --return-num-output-tokens",
        )
    )
    assert "kv_cache_reused_blocks: " in printed
    assert "Output token count: [[" in printed


@pytest.mark.parametrize("cancel", ["", "--stop-via-request-cancel"], ids=["stop", "cancel"])
@pytest.mark.parametrize("kind", ["streams", "whole"])
def test_upstreams_client_stops_an_answer(run: Run, kind: str, cancel: str, tmp_path: Path) -> None:
    """The client fails if all tokens came, which a busy machine may not be able to help: it has more chances."""
    (tmp_path / "ids.csv").write_text("1,3,617,4,614,60", "utf-8")
    streaming = "--streaming" if kind == "streams" else ""
    command = (
        "inflight_batcher_llm_client.py --url localhost:8001 --input-tokens-csv ids.csv --request-output-len 256 "
        f"--stop-after-ms 100 --request-id 11 --temperature 3 --top-k 2000 {streaming} {cancel}"
    )
    for attempt in range(5):
        try:
            printed = run(upstream(kind, command))
        except ProgramFailed as failed:
            if "expect less than" not in str(failed) or attempt == 4:
                raise
        else:
            break
    assert ("Request is cancelled" if cancel else "Got cancellation response from server") in printed


@pytest.mark.parametrize(
    ("kind", "command", "message"),
    [
        ("streams", INFLIGHT, "ModelInfer RPC doesn't support models with decoupled transaction policy"),
        ("whole", f"{INFLIGHT} --streaming", "streaming = true: the model is not decoupled"),
        (
            "streams",
            "e2e_grpc_speculative_decoding_client.py --url-target localhost:8001 --prompt hello",
            "ModelInfer RPC doesn't support models with decoupled transaction policy",
        ),
        (
            "whole",
            "e2e_grpc_speculative_decoding_client.py --url-target localhost:8001 --prompt hello "
            "--draft-tensorrt-llm-model-name tensorrt_llm_draft --num-draft-tokens 5",
            "draft_input_ids: 5 tokens; at most 4 here",
        ),
        (
            "streams",
            f"{INFLIGHT} --streaming --beam-width 2",
            "beam_width = 2: this engine decodes with one beam",
        ),
    ],
    ids=["decoupled", "whole", "decoupled-drafts", "drafts", "beams"],
)
def test_upstreams_client_is_told_what_cannot_be(run: Run, kind: str, command: str, message: str) -> None:
    with pytest.raises(ProgramFailed, match=re.escape(message)):
        run(upstream(kind, command))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_upstreams_end_to_end_client_asks_for_a_batch_and_its_cost(run: Run, model: str) -> None:
    batch = END_TO_END.replace("--prompt hello", """--prompt '["hello", "my order"]'""")
    for more in (
        f"{batch} --batch-inputs --streaming",
        f"{END_TO_END} --return-perf-metrics --return-log-probs",
    ):
        printed = run(upstream("streams", f"{more} --model-name {model}"))
        assert "error" not in printed
    assert "acceptance_rate: " in printed


DECOUPLED = {
    "grpc infer": "ModelInfer RPC doesn't support models with decoupled transaction policy",
    "http infer": "HTTP end point doesn't support models with decoupled transaction policy",
}
WRONG = {
    "wrong dtype": "inference input 'max_tokens' data-type is 'INT64', but model 'tensorrt_llm_bls' expects 'INT32'",
    "missing input": "max_tokens: is missing",
    "unknown input": "unexpected inference input 'max_new_tokens' for model 'tensorrt_llm_bls'",
    "wrong shape": "unexpected shape for input 'max_tokens' for model 'tensorrt_llm_bls'. Expected [-1,1], got [1].",
    "long prompt": "tokens; at most 768 here",
    "too many tokens": "max_tokens = 100000: must be 1 to 256 tokens here",
}


def test_tritonclient_sees_health_answers_and_faults(
    program: Callable[[str], Program], deployments: Deployments, answer: str
) -> None:
    """By its four clients: gRPC and HTTP, blocking and asyncio, answers whole and streamed."""
    client = program("triton_sdk")
    said = {
        kind: client.script("protocol.py", PROMPT, **variables) for kind, variables in deployments.items()
    }
    for kind, found in said.items():
        for seen in found["seen"].values():
            assert all(seen[name] is True for name in ("live", "ready", "model", "ensemble"))
            assert seen["unknown"] is False
            assert (seen["required"], seen["outputs"]) == (["text_input", "max_tokens"], ["text_output"])
            assert seen["decoupled"] is (kind == "streams")
            assert seen["answers"] == "tensorrt_llm_bls"
            assert seen["unknown model"][1] == MODEL_UNKNOWN
            for call in ("index", "load"):
                assert seen[call][0] in {"403", "StatusCode.UNAVAILABLE"}
                assert "restricted" in seen[call][1]
    streams, whole = said["streams"], said["whole"]
    assert set(whole["answers"].values()) == {whole["answers"]["grpc infer"]}
    assert answer.startswith(whole["answers"]["grpc infer"])
    for way, text in streams["answers"].items():
        if way.endswith("infer"):
            message = DECOUPLED[way.removeprefix("asyncio ")]
            assert text == ["501" if "http" in way else "StatusCode.UNIMPLEMENTED", message]
        else:
            assert text == whole["answers"]["grpc infer"]
    for way, faults in whole["faults"].items():
        for fault, message in WRONG.items():
            status, text = faults[fault]
            assert message in text, (way, fault)
            if way.endswith("infer"):
                assert status == ("400" if "http" in way else "StatusCode.INVALID_ARGUMENT"), (way, fault)
    # In a stream, errors have no status; with the header, those of the model do.
    for fault in ("missing input", "long prompt", "too many tokens"):
        assert whole["faults"]["grpc stream"][fault][0] is None
        assert whole["faults"]["grpc stream with codes"][fault][0] == "StatusCode.INVALID_ARGUMENT"


def test_kserves_sdk_sees_health_answers_and_faults(
    program: Callable[[str], Program], deployments: Deployments, answer: str
) -> None:
    client = program("kserve")
    whole = client.script("protocol.py", PROMPT, **deployments["whole"])
    for name, invalid in (("rest", 400), ("grpc", "INVALID_ARGUMENT")):
        found: dict[str, Any] = whole[name]
        assert found["answer"]
        assert answer.startswith(found["answer"])
        for fault in ("wrong dtype", "missing input", "long prompt"):
            status, text = found["faults"][fault]
            assert status == invalid
            # What the model refuses has no content type over HTTP, and this SDK then leaves the text out.
            assert (WRONG[fault] if name == "grpc" or fault == "wrong dtype" else "400 Bad Request") in text
    assert [whole["grpc"][name] for name in ("live", "ready", "model")] == [True] * 3
    assert whole["rest"]["model"] is True
    # The SDK reads a JSON body, and Triton's is empty.
    assert whole["rest"]["ready"][0] == "JSONDecodeError"
    streams = client.script("protocol.py", PROMPT, **deployments["streams"])
    assert streams["grpc"]["answer"] == ["UNIMPLEMENTED", DECOUPLED["grpc infer"]]
    assert streams["rest"]["answer"][0] == 501
    assert streams["grpc"]["ready"] is True


def test_the_page_has_an_example_of_each_program() -> None:
    """On both kinds of deployment, where both can be."""
    assert {(example.program, example.kind) for example in EXAMPLES} >= {
        ("triton_sdk", "streams"), ("triton_sdk", "whole"), ("kserve", "whole"), ("inflight_batcher", "streams"),
        ("inflight_batcher", "whole"), ("perf_analyzer", "streams"), ("perf_analyzer", "whole"),
    }  # fmt: skip
