"""`pipeline versions`, as a user calls it: the matrix, and why combinations are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contracts import read_facts
from pipeline.contracts.releases import TRACKS, half, releases
from tests.cli.conftest import Run


def test_the_matrix_has_a_row_a_release(run: Run) -> None:
    done = run("versions")
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith(" ")}
    for known in releases():
        row = rows[known.version]
        for cell in (
            *known.tracks,
            *(c.release or c.image for c in known.containers),
            known.tensorrt or "none",
            known.torch,
            known.modelopt or "none",
            "candidate" if known.candidate else "",
        ):
            assert cell is not None
            assert cell in row
    for track in TRACKS:
        assert half(track) in done.out
    assert "1.4.0rc1: its arguments of the LLM API rest on the schema" in done.out
    assert "1.2.1: its arguments" not in done.out
    assert "26.03*" in rows["1.2.0"]
    assert "* 25.11: the support table says 1.0.3.2510, the backend's branch 1.2.0rc2" in done.out


def test_the_matrix_as_json(run: Run) -> None:
    found = run("versions", "--json").json
    assert [row["version"] for row in found["releases"]] == [release.version for release in releases()]
    assert [row["version"] for row in found["releases"] if row["candidate"]] == ["1.3.0rc29", "1.4.0rc1"]
    stable = next(row for row in found["releases"] if row["version"] == "1.2.1")
    assert stable["arguments_rest_on"] is None
    newest = stable["containers"][-1]
    assert newest["image"] == "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    assert newest["driver"] == "590.44.01"


def test_one_release_and_one_runtime(run: Run) -> None:
    assert [row["version"] for row in run("versions", "1.1.0", "--json").json["releases"]] == ["1.1.0"]
    only = [row["version"] for row in run("versions", "--runtime", "pytorch", "--json").json["releases"]]
    assert only == [release.version for release in releases()]
    engines = [row["version"] for row in run("versions", "--runtime", "tensorrt", "--json").json["releases"]]
    assert engines == ["1.0.0", "1.1.0", "1.2.0", "1.2.1"]
    candidate = run("versions", "1.3.0rc29")
    assert "nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc29" in candidate.out
    assert half("tensorrt") in candidate.out


def test_an_unknown_gpu_is_refused_once(run: Run) -> None:
    done = run("versions", "--gpu", "h100")
    assert (done.code, done.out) == (2, "")
    assert done.err == "pipeline: GPU h100 is not known; near: h100-sxm-80g, h100-pcie-80g, h100-nvl-94g\n"


def test_an_unknown_release_names_near_ones(run: Run) -> None:
    done = run("versions", "1.2.3")
    assert done.code == 2
    assert "TensorRT-LLM 1.2.3 is not known; near: " in done.err
    assert "1.2.1" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("1.2.1", "--runtime", "tensorrt"), 0,
         "1.2.1 tensorrt: yes, nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"),
        (("0.21.0", "--runtime", "pytorch"), 2, "0.21.0 is not supported; the oldest is 1.0.0"),
        (("1.3.0rc29", "--runtime", "tensorrt"), 2, "with it: 1.0.0, 1.1.0, 1.2.0, 1.2.1. Engines"),
        (("1.4.0rc1", "--runtime", "pytorch", "--gpu", "b200-sxm-180g", "--quantization", "nvfp4"), 0,
         "yes, pipeline-triton:1.4.0rc1"),
        (("2.0.0", "--runtime", "pytorch"), 2, "2.0.0 is not known; near: 1.2.1, 1.3.0rc29, 1.4.0rc1"),
        (("1.2.1", "--runtime", "tensorrt", "--gpu", "b200-sxm-180g", "--quantization", "int4_awq"), 2,
         "refuses INT4 AWQ weights on compute capability 10.0 to 11.9 [builder]"),
        (("1.2.1", "--gpu", "b200-sxm-180g", "--quantization", "int4_awq"), 0, "1.2.1 pytorch: yes"),
        (("1.2.1", "--gpu", "h100-sxm-80g", "--quantization", "nvfp4"), 2, "NVFP4 needs Blackwell"),
        (("1.2.1", "--gpu", "a100-sxm-80g", "--quantization", "fp8"), 2, "compute capability 8.9 or newer"),
        (("1.0.0", "--gpu", "b300-sxm-288g"), 2, "came with TensorRT-LLM 1.1.0"),
        (("1.2.1", "--runtime", "tensorrt", "--quantization", "int4_awq", "--kv-cache", "fp8"), 0,
         "leaves no reuse, no chunked context and no draft"),
        (("9.9.9", "--runtime", "pytorch"), 2, "9.9.9 pytorch: no"),
    ],
)  # fmt: skip
def test_check(run: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = run("versions", *arguments)
    assert (done.code, done.err) == (code, "")
    assert said in done.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("1.1.0", "GptOssForCausalLM"), 0, "features, no: chunked prefill, MTP, reuse of the KV cache"),
        (("1.2.1", "hf:openai/gpt-oss-20b"), 0, "features, no: MTP\n"),
        (
            ("1.2.1", "hf:openai/gpt-oss-20b", "--gpu", "h200-sxm-141g"),
            0,
            "upstream lists MXFP4 for Blackwell only",
        ),
        (("1.2.1", "GlmMoeDsaForCausalLM"), 0, "1.3.0rc29 is the first that it is listed for"),
        (("1.0.0", "DeepseekV3ForCausalLM"), 0, "chunked prefill (compute capability 10.0)"),
        (("1.0.0", "DeepseekV3ForCausalLM", "--gpu", "h200-sxm-141g"), 0, "features, no: chunked prefill"),
        (
            ("1.4.0rc1", "DeepseekV4ForCausalLM", "--gpu", "h200-sxm-141g"),
            2,
            "set runtime.gpu to b200-sxm-180g",
        ),
        (("1.2.1", "LlamaForCausalLM"), 0, "upstream's matrix has no row for the model"),
        (("1.2.1", "GPT2LMHeadModel"), 2, "is not among the models that the PyTorch backend"),
    ],
)
def test_a_model(run: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    version, model, *rest = arguments
    done = run("versions", version, "--runtime", "pytorch", "--model", model, *rest)
    assert (done.code, done.err) == (code, "")
    assert said in done.out


def test_a_local_model_and_what_names_none(run: Run, tmp_path: Path) -> None:
    config = read_facts("models/gpt-oss.yaml")["models"]["openai/gpt-oss-20b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = run("versions", "--runtime", "pytorch", "--model", f"local:{tmp_path}", "--json").json
    answers = {answer["version"]: answer["features"] for answer in found}
    assert answers["1.1.0"]["kv_reuse"] == {
        "label": "reuse of the KV cache", "answer": "no", "capabilities": "", "needs": [], "sources": ["p11"],
    }  # fmt: skip
    assert answers["1.2.1"]["kv_reuse"]["answer"] == "yes"
    for wrong, said in {
        "openai/gpt-oss": "hf:ORG/NAME",
        "foo:bar": "source",
        "local:/nope": "cannot be read",
    }.items():
        done = run("versions", "--model", wrong)
        assert done.code == 2
        assert said in done.err


def test_check_without_a_release_goes_over_all(run: Run) -> None:
    done = run("versions", "--gpu", "b300-sxm-288g", "--runtime", "tensorrt", "--json")
    assert done.code == 0
    assert [answer["version"] for answer in done.json if answer["offered"]] == ["1.1.0", "1.2.0", "1.2.1"]
    refused = next(answer for answer in done.json if answer["version"] == "1.0.0")
    assert refused["reasons"][0]["severity"] == "error"
    assert refused["reasons"][0]["sources"] == ["relnotes"]


def test_all_reasons_at_once(run: Run) -> None:
    done = run(
        "versions",
        "0.21.0",
        "--runtime",
        "pytorch",
        "--gpu",
        "a10-24g",
        "--quantization",
        "nvfp4",
        "--json",
    )
    assert done.code == 2
    assert len(done.json[0]["reasons"]) == 2


def test_an_image_that_is_built_first_is_printed_with_its_command(run: Run) -> None:
    shipped, joined = run("versions", "1.2.1").out, run("versions", "1.4.0rc1").out
    assert "pytorch is served in pipeline-triton:1.2.1, which is built first" in shipped
    assert "--build-arg TRITON_IMAGE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3" in shipped
    for image in ("TRTLLM_IMAGE=nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1", "PLAIN_TRITON_IMAGE=nvcr.io/"):
        assert f"--build-arg {image}" in joined
    assert "built and run by nobody that we know of" in joined
    row = run("versions", "1.2.1", "--json").json["releases"][0]
    assert row["images"]["tensorrt"]["why"] is None
    assert row["images"]["pytorch"]["arguments"] == {"TRITON_IMAGE": row["images"]["tensorrt"]["name"]}
