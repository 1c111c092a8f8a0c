"""Engines held against their commands: what may differ, and what may not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.trtllm_build import config_value, flags, named_flags, parse
from pipeline.errors import StageError
from pipeline.recipe import load_recipe
from pipeline.runtimes.tensorrt.build_effects import CheckpointConfig, effects
from pipeline.runtimes.tensorrt.building import verify
from pipeline.runtimes.tensorrt.flags import trtllm_build_flags
from tests.support.tensorrt import make_ranks
from tests.support.trtllm_build import Machine, main

VERSION = "1.2.1"
ARGV = trtllm_build_flags(load_recipe("llama-3.1-8b-fp8"), "target")
Config = dict[str, Any]


class Built:
    """An engine, its checkpoint and its command."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_ranks(folder / "ranks", weights="fp8", kv_cache="FP8")
        self.engine = folder / "engine"
        words = ["--checkpoint_dir", str(self.checkpoint), "--output_dir", str(self.engine)]
        words += ["--output_timing_cache", str(folder / "timing.cache")]
        assert main([*words, *ARGV], Machine(VERSION, 90)) == 0

    def edit(self, change: Callable[[Config], Any]) -> None:
        path = self.engine / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    def verify(self, *warnings: str) -> None:
        source = json.loads((self.checkpoint / "config.json").read_text())
        verify(
            self.engine,
            version=VERSION,
            argv=ARGV,
            expected=effects(VERSION, ARGV, CheckpointConfig.of(source), 90),
            checkpoint=self.checkpoint,
            warnings=warnings,
        )


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return Built(tmp_path)


def test_as_asked_for(built: Built) -> None:
    built.verify()


SAID = sorted(name for name in named_flags(VERSION, ARGV) if flags(VERSION)[name].config is not None)


def test_every_value_that_was_asked_for_counts(built: Built) -> None:
    """Another one, and none at all."""
    path = built.engine / "config.json"
    original = path.read_text()
    for name in SAID:
        *way, last = flags(VERSION)[name].in_config
        wanted = config_value(flags(VERSION)[name], parse(VERSION, ARGV)[name])

        def spoil(config: Config, way: list[str] = way, last: str = last) -> None:
            for key in way:
                config = config[key]
            value = config[last]
            config[last] = (
                not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "other"
            )

        def remove(config: Config, way: list[str] = way, last: str = last) -> None:
            for key in way:
                config = config[key]
            del config[last]

        built.edit(spoil)
        asked = "" if name == "max_seq_len" else re.escape(repr(wanted))
        place = re.escape(".".join((*way, last)))
        with pytest.raises(StageError, match=rf"config.json: {place} is .*, asked for {asked}"):
            built.verify()
        path.write_text(original)
        built.edit(remove)
        if wanted is None:
            built.verify()  # "no plugin" may be said by leaving it out
        else:
            with pytest.raises(StageError, match="is None, asked for"):
                built.verify()
        path.write_text(original)


def test_a_plugin_of_the_models_type(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json may have "auto" itself, or the type that it stands for."""
    argv = (*ARGV, "--gemm_plugin", "auto")
    monkeypatch.setitem(globals(), "ARGV", argv)
    for value in ("auto", "bfloat16"):
        built.edit(
            lambda config, value=value: config["build_config"]["plugin_config"].update(gemm_plugin=value)
        )
        built.verify()
    built.edit(lambda config: config["build_config"]["plugin_config"].update(gemm_plugin="float16"))
    with pytest.raises(StageError, match="gemm_plugin is 'float16', asked for 'auto'"):
        built.verify()


def test_what_upstream_adds(built: Built) -> None:
    def add(config: Config) -> None:
        config["pretrained_config"] |= {"embedding_multiplier": 1.0, "runtime_defaults": None}
        config["pretrained_config"]["quantization"] |= {"smoothquant_val": 0.5, "group_size": 128}
        config["build_config"] |= {"use_mrope": False, "auto_parallel_config": {}}
        config["build_config"]["plugin_config"]["smooth_quant_plugins"] = True

    built.edit(add)
    built.verify()


def test_experts_that_a_checkpoint_leaves_open(built: Built) -> None:
    path = built.checkpoint / "config.json"
    source = json.loads(path.read_text())
    source["mapping"] |= {"moe_tp_size": -1, "moe_ep_size": -1}
    path.write_text(json.dumps(source))
    built.verify()


@pytest.mark.parametrize(("algorithm", "lost"), [("MIXED_PRECISION", False), ("W4A16_AWQ", True)])
def test_what_config_json_keeps_of_a_quantization(built: Built, algorithm: str, lost: bool) -> None:
    path = built.checkpoint / "config.json"
    source = json.loads(path.read_text())
    source["quantization"] |= {"quant_algo": algorithm, "group_size": 128}
    path.write_text(json.dumps(source))
    kept = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    built.edit(lambda config: config["pretrained_config"].update(quantization=kept))
    with pytest.raises(StageError) as caught:  # the command is one for FP8
        built.verify()
    assert ("quantization.group_size is None, the checkpoint has 128" in str(caught.value)) == lost
    assert "quant_algo" not in str(caught.value)


def test_warnings_that_are_always_there(built: Built) -> None:
    built.verify(
        "padding removal and fMHA are both enabled, max_input_len is not required and will be ignored",
        "remove_input_padding is enabled, while opt_num_tokens is not set, setting to max_batch_size*max_beam_width. ",
        "Invalid timing cache, using freshly created one",
        "Overriding reduce_fusion to False",  # which nobody asked for
        "something else",
    )


def test_a_warning_of_a_change(built: Built) -> None:
    with pytest.raises(StageError, match="max_num_tokens was changed: the builder says: max_num_tokens"):
        built.verify(
            "max_num_tokens (8192) shouldn't be greater than max_seq_len * max_batch_size (4096), specifying to "
            "max_seq_len * max_batch_size (4096)."
        )


def test_weights_beside_the_plan(built: Built) -> None:
    (built.engine / "rank0.engine").write_bytes(b"plan")
    with pytest.raises(StageError, match="cannot hold the weights"):
        built.verify()
    (built.engine / "rank0_managed_weights.safetensors").write_bytes(b"w" * 2996)
    built.verify()
