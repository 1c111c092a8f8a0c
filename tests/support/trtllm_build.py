"""A stand-in for `trtllm-build` that obeys the contract: it takes the flags of its version, reads a checkpoint, changes
what the builder changes, says what the builder says, and leaves what the builder leaves. A plan is the rank's weights.

STAND_IN_TRTLLM_BUILD_FAILS makes it fail in one of the ways in FAILURES.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.trtllm_build import Flag, data, flags
from pipeline.contracts.version_range import precedes
from pipeline.runtimes.tensorrt.build_effects import BuildEffects, CheckpointConfig, effects
from tests.support.fork_server import put_program

if TYPE_CHECKING:
    import pytest

FAILS = "STAND_IN_TRTLLM_BUILD_FAILS"
FAILURES = {  # what happens
    "gpu_memory": "TensorRT runs out of the GPU's memory",
    "wrong_sm": "TensorRT does not know the GPU",
    "tensorrt_version": "two versions of TensorRT meet",
    "unsupported": "the builder does not do the combination",
    "killed": "the kernel kills it",
    "other_version": "config.json is of another version",
    "other_mapping": "config.json is of another number of ranks",
    "other_quantization": "config.json is of other weights",
    "rewrite": "paged context FMHA is turned off, and a warning says so",
    "silent_rewrite": "max_num_tokens is raised, and nothing says so",
    "told_rewrite": "a warning says that paged context FMHA was turned off, config.json does not",
    "missing_rank": "the last rank has no plan",
    "empty_rank": "the last rank's plan is empty",
    "truncated": "the last rank's plan is cut off",
    "left_over": "there is a plan of a rank that does not exist",
    "no_config": "there is no config.json",
    "broken_config": "config.json ends in the middle",
    "bare_config": "config.json has no build_config",
    "nothing": "it ends well and leaves nothing",
}
_CRASHES = {
    "gpu_memory": "[TRT] [E] Error Code 2: OutOfMemory (Requested size was 34359738368 bytes.)",
    "wrong_sm": "[TRT] [E] IBuilder::buildSerializedNetwork: Error Code 9: API Usage Error (Target GPU SM 70 is not "
    "supported by this TensorRT release.)",
    "tensorrt_version": "[TRT] [E] The engine plan file is not compatible with this version of TensorRT, expecting "
    "library version 10.14.1.48 got 10.11.0.33",
    "unsupported": "NotImplementedError: gemm_swiglu_plugin=fp8 is not supported on SM 100.",
}
_ALWAYS = (
    "Option --gather_generation_logits is deprecated, a build flag is not required anymore. Use "
    "--output_generation_logits at runtime instead.",
    "padding removal and fMHA are both enabled, max_input_len is not required and will be ignored",
)


def put_trtllm_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, version: str = "1.2.1", sm: int = 90
) -> Path:
    """Make it the first `trtllm-build` on PATH; the folder of the program."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    put_program(programs / "trtllm-build", __name__, version=version, sm=sm)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return programs


class Machine:
    """Where it runs."""

    def __init__(self, version: str, sm: int) -> None:
        self.version, self.sm = version, sm
        self.failure = os.environ.get(FAILS, "")
        assert self.failure in ("", *FAILURES), self.failure


def run(argv: Sequence[str], version: str, sm: int) -> int:
    """Run it as a program of `fork_server`; the exit code."""
    return main(argv, Machine(version, sm))


def parser(version: str) -> argparse.ArgumentParser:
    """Upstream's argument parser."""
    made = argparse.ArgumentParser(prog="trtllm-build")
    for flag in flags(version).values():
        names = [f"--{name}" for name in (flag.name, *flag.aliases)]
        if flag.kind == "switch":
            made.add_argument(*names, dest=flag.name, action="store_true")
        else:
            made.add_argument(*names, dest=flag.name, default=flag.default, **_reading(flag))
    return made


def _reading(flag: Flag) -> dict[str, Any]:
    return {
        "type": int if flag.kind == "integer" else str,
        "choices": flag.choices or None,
        "nargs": "+" if flag.kind == "list" else None,
    }


def main(argv: Sequence[str], machine: Machine) -> int:
    """Run it; the exit code. As upstream, it raises what the builder raises."""
    print(f"[TensorRT-LLM] TensorRT-LLM version: {machine.version}", flush=True)
    arguments = parser(machine.version).parse_args(argv)  # exits with 2
    checkpoint, output = Path(arguments.checkpoint_dir), Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    try:
        _build(argv, arguments, checkpoint, output, machine)
    except Exception:
        traceback.print_exc()
        return 1
    _say("I", "Total time of building all engines: 00:00:01")
    return 0


def _build(
    argv: Sequence[str], arguments: argparse.Namespace, checkpoint: Path, output: Path, machine: Machine
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    outcome = effects(machine.version, argv, CheckpointConfig.of(config), machine.sm)
    if not Path(arguments.input_timing_cache or "").is_file():
        _say("W", "Invalid timing cache, using freshly created one")
    _say("W", "Implicitly setting LLaMAConfig.layer_idx_offset = 0")
    for rank in range(config["mapping"]["world_size"]):
        weights = checkpoint / f"rank{rank}.safetensors"
        assert os.path.isfile(weights), f"assert os.path.isfile(weights_path)  # {weights}"
        for text in (*_ALWAYS, *(message.text for message in outcome.messages)):
            _say("W", text)
        if rank == 0:
            _say("W", "Something that no contract knows")
        if outcome.refusal:
            name, _, text = outcome.refusal.partition(": ")
            raise type(name, (Exception,), {"__module__": "builtins"})(text)
        _say("I", "Total time of constructing network from module object 0.5 seconds")
        _say("I", "Build TensorRT engine Unnamed Network 0")
        if machine.failure in _CRASHES:
            print(_CRASHES[machine.failure], flush=True)
            raise AssertionError("Engine building failed, please check the error log.")
        if machine.failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        _say("I", "Total time of building Unnamed Network 0: 00:00:01")
        if rank == 0:
            Path(arguments.output_timing_cache).write_bytes(b"timing cache")
            _say("I", f"Timing cache serialized to {arguments.output_timing_cache}")
            if machine.failure != "nothing":
                written = _config(machine, config, outcome)
                (output / "config.json").write_text(json.dumps(written, indent=4))
        _say("I", "Build phase peak memory: 1000.00 MB, children: 24.00 MB")
        plan = output / f"rank{rank}.engine"
        _say("I", f"Serializing engine to {plan}...")
        if machine.failure != "nothing":
            plan.write_bytes(weights.read_bytes())
        _say("I", "Engine serialized. Total time: 00:00:00")
    _damage(output, config["mapping"]["world_size"] - 1, machine.failure)


def _config(machine: Machine, checkpoint: dict[str, Any], outcome: BuildEffects) -> dict[str, Any]:
    known = flags(machine.version)
    config: dict[str, Any] = {
        "version": machine.version,
        "pretrained_config": {
            **checkpoint,
            "mapping": {"cp_size": 1, "gpus_per_node": 8, **checkpoint["mapping"]},
            "logits_dtype": checkpoint.get("logits_dtype", "float32"),
            "quantization": _quantization(checkpoint.get("quantization") or {}),
        },
        "build_config": {
            "opt_batch_size": 8,
            "strongly_typed": True,
            "use_refit": False,
            "lora_config": {"lora_dir": [], "lora_ckpt_source": "hf", "max_lora_rank": 64},
            "plugin_config": {},
        },
    }
    for name, value in outcome.values.items():
        if known[name].config is None or (name == "logits_dtype" and value is None):
            continue
        *way, last = known[name].in_config
        place = config
        for key in way:
            place = place[key]
        place[last] = value
    built = config["build_config"]
    if not precedes(machine.version, "1.2.0"):
        built["kv_cache_type"] = built["kv_cache_type"].lower()
    else:
        built["auto_parallel_config"] = {"world_size": 1, "gpus_per_node": 8}
    plugins = built["plugin_config"]
    plugins |= {"dtype": checkpoint["dtype"], "paged_kv_cache": True}
    _pretend(machine.failure, config, plugins)
    return config


def _quantization(said: dict[str, Any]) -> dict[str, Any]:
    """With upstream's defaults; where each layer has a format of its own, only that it is so."""
    mixed = data()["mixed"]
    if said.get("quant_algo") == mixed["algorithm"]:
        return {key: said.get(key) for key in mixed["keys"]}
    none = dict.fromkeys(("quant_algo", "kv_cache_quant_algo", "clamp_val", "exclude_modules"))
    return {**none, "group_size": 128, "smoothquant_val": 0.5, "has_zero_point": False, **said}


def _pretend(failure: str, config: dict[str, Any], plugins: dict[str, Any]) -> None:
    warning = "FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled."
    if failure in ("rewrite", "told_rewrite"):
        _say("W", warning)
    match failure:
        case "rewrite":
            plugins["use_paged_context_fmha"] = False
        case "silent_rewrite":
            config["build_config"]["max_num_tokens"] += 32
        case "other_version":
            config["version"] = "0.18.0"
        case "other_mapping":
            config["pretrained_config"]["mapping"]["tp_size"] += 1
        case "other_quantization":
            config["pretrained_config"]["quantization"] = {"quant_algo": "W8A16", "kv_cache_quant_algo": None}
        case "bare_config":
            del config["build_config"]


def _damage(output: Path, last: int, failure: str) -> None:
    plan, config = output / f"rank{last}.engine", output / "config.json"
    match failure:
        case "missing_rank":
            plan.unlink()
        case "empty_rank":
            plan.write_bytes(b"")
        case "truncated":
            plan.write_bytes(plan.read_bytes()[: plan.stat().st_size // 3])
        case "left_over":
            (output / f"rank{last + 1}.engine").write_bytes(b"plan")
        case "no_config":
            config.unlink()
        case "broken_config":
            config.write_text(config.read_text()[:-100])


def _say(severity: str, text: str) -> None:
    print(f"[11/20/2026-10:00:00] [TRT-LLM] [{severity}] {text}", flush=True)
