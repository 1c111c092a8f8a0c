"""From recipes to the flags of engines: a golden file of all formats, and what holds for any recipe.

`PIPELINE_WRITE_GOLDEN=1 pytest` writes the golden file after a change.
"""

from __future__ import annotations

import os
import re
import shlex
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.gpus import gpu
from pipeline.contracts.trtllm_build import (
    argv_of,
    check,
    entries_of,
    flags,
    named_flags,
    parse,
    tunable,
    versions,
)
from pipeline.errors import InvalidInput, StageError, UserError
from pipeline.plan.model_facts import offline_facts
from pipeline.plan.parallelism import parallelism
from pipeline.plan.preflight.context import Objection, make_context
from pipeline.plan.preflight.run_rules import RECIPE_CHECKS
from pipeline.prepare.facts import read_settings
from pipeline.recipe import Recipe, load_recipe, packaged
from pipeline.runtimes.tensorrt.build_effects import CheckpointConfig, effects
from pipeline.runtimes.tensorrt.flags import (
    Formats,
    checkpoint_formats,
    engine_limits,
    formats,
    trtllm_build_flags,
)
from pipeline.runtimes.tensorrt.runtime import TensorRTBackend
from tests.support.tensorrt import DRAFTED, FORMATS, rank_config, recipe, recipes, roles

GOLDEN = Path(__file__).parent / "golden" / "trtllm_build.txt"


def combinations(version: str) -> dict[str, tuple[str, ...]]:
    """Name -> flags, of every format with each KV cache that goes with it, alone and with a draft."""
    found = {}
    for weights, kv_cache, draft in product(FORMATS, ("auto", "fp8"), (None, {})):
        try:
            made = recipe(weights, kv_cache, version=version, draft=draft)
        except ValueError:
            continue  # the recipe's own rules
        for role in roles(made):
            name = f"{weights}, KV cache {kv_cache}, {'alone' if draft is None else role}"
            try:
                found[name] = trtllm_build_flags(made, role)
            except InvalidInput:
                found[name] = ("refused",)
    return found


def test_golden() -> None:
    """Versions with the same flags stand together."""
    blocks: dict[str, list[str]] = {}
    for version in versions():
        lines = [f"  {name}: {shlex.join(words)}" for name, words in combinations(version).items()]
        blocks.setdefault("\n".join(lines).replace(" --", "\n    --"), []).append(version)
    text = "\n".join(f"{', '.join(alike)}:\n{block}\n" for block, alike in blocks.items())
    if os.environ.get("PIPELINE_WRITE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert GOLDEN.read_text(encoding="utf-8") == text


@given(recipes)
@settings(max_examples=100)
def test_the_builder_keeps_what_it_is_asked_for(made: Recipe) -> None:
    for role in roles(made):
        try:
            words = trtllm_build_flags(made, role)
        except InvalidInput:
            continue
        found, sizes = formats(made, role), parallelism(made, role)
        model = CheckpointConfig("LlamaForCausalLM", found.algorithm, found.kv_algorithm, sizes.tensor)
        outcome = effects(made.runtime.version, words, model, gpu(made.runtime.gpu).sm)
        limits = engine_limits(made, role)
        assert check(made.runtime.version, words) == []
        assert outcome.refusal is None
        assert outcome.changes == ()
        assert outcome.values["max_seq_len"] == limits.max_seq_len + limits.max_draft_len
        assert outcome.values["max_num_tokens"] == limits.max_num_tokens
        needs = made.kv_cache.reuse or made.scheduler.chunked_context or made.draft is not None
        assert outcome.values["use_paged_context_fmha"] == needs == limits.paged_context_fmha


@pytest.mark.parametrize(
    ("weights", "kv_cache", "on", "said_by_the_builder"),
    [
        (
            "int4_awq",
            "fp8",
            "h100-sxm-80g",
            "FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled",
        ),
        ("fp8", "fp8", "a100-sxm-80g", "FP8 Paged Context FMHA is disabled"),
        ("int4_awq", "auto", "b200-sxm-180g", "INT8/INT4 quantization is not supported on SM>=100"),
        ("int8_sq", "auto", "b200-sxm-180g", "SmoothQuant is not supported on SM>=100"),
    ],
)
def test_what_the_builder_would_turn_off_or_refuse(
    weights: str, kv_cache: str, on: str, said_by_the_builder: str
) -> None:
    with pytest.raises(InvalidInput, match=said_by_the_builder) as caught:
        trtllm_build_flags(recipe(weights, kv_cache, on=on), "target")
    assert f"quantization.format = {weights}" in str(caught.value)


def test_without_need_of_pages_formats_go_together() -> None:
    made = recipe("int4_awq", "fp8", kv_cache={"reuse": False}, scheduler={"chunked_context": False})
    values = parse("1.2.1", trtllm_build_flags(made, "target"))
    assert values["use_paged_context_fmha"] == values["use_fp8_context_fmha"] == "disable"


def test_recipes_of_the_library() -> None:
    library = [made for name in packaged() if (made := load_recipe(name, [])).runtime.kind == "tensorrt"]
    for made in library:
        for role in roles(made):
            words = trtllm_build_flags(made, role)
            assert check(made.runtime.version, words) == []
            assert "--use_paged_context_fmha enable" in shlex.join(words)


def of_library(name: str, *flags_: str, **overrides: str) -> Recipe:
    said_flags = [f"runtime.build_flags=[{', '.join(flags_)}]"]
    return load_recipe(
        name, [*said_flags, *(f"{key.replace('__', '.')}={value}" for key, value in overrides.items())]
    )


def test_flags_that_a_recipe_says_itself() -> None:
    made = of_library("llama-3.3-70b-fp8", "reduce_fusion=enable", "user_buffer=enable", "gemm_plugin=fp8")
    values = parse("1.2.1", trtllm_build_flags(made, "target"))
    assert (values["reduce_fusion"], values["user_buffer"], values["gemm_plugin"]) == (
        "enable",
        "enable",
        "fp8",
    )
    assert parse("1.2.1", trtllm_build_flags(made, "draft"))["reduce_fusion"] == "disable", (
        "they are the target's"
    )
    assert trtllm_build_flags(made, "target").count("--gemm_plugin") == 1


NAMES = sorted({*flags("1.0.0"), *flags("1.2.1"), "reduce_fusoin", "--user_buffer", ""})
VALUES = ["", "=", "=enable", "=on", "=true", "=auto", "=fp8", "=8", "=0", "=-5", "=1.5", "=8 --dry_run"]
of_recipes = st.one_of(
    st.sampled_from([entry for name in tunable("1.2.1") for entry in entries_of(flags("1.2.1")[name])]),
    st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).map("".join),
)


@given(version=st.sampled_from(versions()), named_flags=st.lists(of_recipes, max_size=3))
@settings(max_examples=30)
def test_what_a_recipe_says_is_built_or_refused_with_an_advice_that_works(
    version: str, named_flags: list[str]
) -> None:
    """Whoever follows each advice, for one entry after the other, ends with a command that trtllm-build takes."""
    for _ in range(20):
        made = load_recipe(
            "qwen2.5-72b-fp8", [f"runtime.version={version}", f"runtime.build_flags={named_flags}"]
        )
        about = make_context(made, offline_facts(made), emitted=read_settings(made))
        objections = [*RECIPE_CHECKS["build.flags"](about), *RECIPE_CHECKS["runtime.refuses"](about)]
        if not objections:
            break
        named_flags = followed(named_flags, objections[0])
    words = trtllm_build_flags(made, "target")
    assert check(version, words) == []
    assert named_flags == [] or all(set(argv_of(entry)) <= set(words) for entry in named_flags)


def followed(named_flags: list[str], objection: Objection) -> list[str]:
    """What a person makes of the recipe's entries who reads one objection."""
    if objection.fix.startswith("leave out "):
        return [entry for entry in named_flags if entry != objection.fix.removeprefix("leave out ")]
    if objection.fix == "keep one of them":
        name = objection.problem.removeprefix("has ").removesuffix(" more than once")
        first = next(entry for entry in named_flags if entry.partition("=")[0] == name)
        return [first, *(entry for entry in named_flags if entry.partition("=")[0] != name)]
    wrong = max((entry for entry in named_flags if f" {entry}: " in objection.problem), key=len)
    words = re.split(r"[ ,]+", objection.fix)
    advised = [word for word in words if word.partition("=")[0] in tunable("1.2.1")]
    assert advised, objection
    return [advised[0] if entry == wrong else entry for entry in named_flags]


def test_flags_that_the_builder_would_turn_off() -> None:
    with pytest.raises(InvalidInput, match="reduce_fusion: asked for True, built with False"):
        trtllm_build_flags(
            of_library("llama-3.3-70b-fp8", "reduce_fusion=enable", runtime__tensor_parallel="1"), "target"
        )
    with pytest.raises(InvalidInput, match="Overriding reduce_fusion to False"):
        trtllm_build_flags(of_library("qwen2.5-72b-fp8", "reduce_fusion=enable"), "target")
    with pytest.raises(InvalidInput, match="multiple_profiles is enabled, while opt_num_tokens is set"):
        trtllm_build_flags(of_library("qwen2.5-72b-fp8", "opt_num_tokens=32"), "target")
    trtllm_build_flags(
        of_library("qwen2.5-72b-fp8", "opt_num_tokens=32", "multiple_profiles=disable"), "target"
    )


def test_an_architecture_that_is_not_known_yet() -> None:
    """hf:a/b: whether the builder keeps the fusion is seen once the checkpoint is here."""
    made = recipe("fp8", tensor=2)
    runtime = made.runtime.model_copy(update={"build_flags": ("reduce_fusion=enable",)})
    assert "--reduce_fusion" in trtllm_build_flags(made.model_copy(update={"runtime": runtime}), "target")


def test_a_draft_has_formats_of_its_own() -> None:
    made = recipe("fp8", "fp8", draft={"quantization": "none"})
    assert formats(made, "target") == Formats("fp8", "fp8")
    assert formats(made, "draft") == Formats("none", "auto"), "it has no scales for another KV cache"
    made = recipe("none", draft={"quantization": "int4_awq"})
    assert formats(made, "draft") == Formats("int4_awq", "auto")


def test_what_auto_chose_is_taken_from_the_checkpoint() -> None:
    made = recipe("auto", "fp8")
    found = checkpoint_formats(rank_config(weights="fp8", kv_cache="FP8"))
    assert found == Formats("fp8", "fp8")
    assert parse("1.2.1", trtllm_build_flags(made, "target", found))["use_fp8_context_fmha"] == "enable"
    mixed = checkpoint_formats(rank_config(weights="auto", kv_cache="FP8"))
    with pytest.raises(InvalidInput, match="FP8 Paged Context FMHA is disabled"):
        trtllm_build_flags(made, "target", mixed)


def test_a_checkpoint_of_another_quantization() -> None:
    config = rank_config() | {"quantization": {"quant_algo": "W8A16"}}
    with pytest.raises(StageError, match="quantized by W8A16"):
        checkpoint_formats(config)


def test_settings_are_what_makes_an_engine() -> None:
    runtime, made = TensorRTBackend(), recipe(draft={})
    settings = runtime.build_settings(made, "target")
    assert settings["version"] == "1.2.1"
    assert settings["gpu"] == "h100-sxm-80g"
    assert tuple(settings["flags"]) == trtllm_build_flags(made, "target")
    for other in (
        recipe(draft={}, version="1.2.0"),
        recipe(draft={}, on="h200-sxm-141g"),
        recipe(draft={"max_draft_tokens": 6}),
        recipe(draft={}, limits={"max_concurrency": 65}),
        recipe(),
    ):
        assert runtime.build_settings(other, "target") != settings
    same = recipe(draft={}, slo={"ttft_p95_ms": 100}, kv_cache={"memory_fraction": 0.5})
    assert runtime.build_settings(same, "target") == settings, "a server's settings need no other engine"
    assert not any("/" in word or word in ("--workers", "--output_dir") for word in settings["flags"])


def test_unknown_versions_and_gpus() -> None:
    with pytest.raises(UserError, match="not known"):
        trtllm_build_flags(recipe(version="1.9.9"), "target")
    with pytest.raises(UserError, match="not offered with runtime tensorrt"):
        trtllm_build_flags(recipe(version="1.3.0rc29"), "target")
    with pytest.raises(UserError, match="GPU h100 is not known"):
        trtllm_build_flags(recipe(on="h100"), "target")


@pytest.mark.parametrize("version", versions())
def test_all_that_matters_is_said(version: str) -> None:
    """Upstream's defaults of these changed, or may."""
    named = named_flags(version, trtllm_build_flags(recipe(draft={}), "target"))
    assert named >= {
        "tokens_per_block", "use_paged_context_fmha", "use_fp8_context_fmha", "max_num_tokens", "kv_cache_type",
        "max_batch_size", "max_seq_len", "context_fmha", "remove_input_padding",
    }  # fmt: skip
    for name in named - {"log_level"}:
        assert flags(version)[name].config is not None, "it can be held against config.json"


def test_logits_of_prompts_are_gathered_where_their_log_probs_are_offered() -> None:
    offered = ("serving.prompt_log_probs=true", "kv_cache.reuse=false")
    for overrides, gathers in ((offered, True), ((), False)):
        chosen = load_recipe("llama-3.1-8b-int4-awq", overrides)
        words = trtllm_build_flags(chosen, "target")
        assert check("1.2.1", words) == []
        assert parse("1.2.1", words)["gather_context_logits"] is gathers
    # With a draft, a rule refuses the recipe before the builder could.
    drafted = load_recipe("llama-3.1-8b-fp8", (*DRAFTED, *offered[:1]))
    for role in ("target", "draft"):
        assert not parse("1.2.1", trtllm_build_flags(drafted, role))["gather_context_logits"]
