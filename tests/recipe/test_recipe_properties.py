"""Properties: dump -> YAML -> load is the identity, overriding is editing, unknown keys are refused anywhere."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.documents import dump_yaml, read_document
from pipeline.errors import InvalidInput
from pipeline.recipe import Recipe, load_recipe, packaged

here = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

Data = dict[str, Any]
names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
sources = st.one_of(
    st.from_regex(r"hf:[A-Za-z0-9]{1,9}/[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1).map(
        lambda t: f"local:/{t}"
    ),
)
bits = {"effective_bits": st.floats(4, 16)}
gpu = {
    "version": st.sampled_from(["1.2.1", "1.0.0", "1.3.0rc29"]),
    "gpu": st.sampled_from(["l4", "h100-sxm-80g"]),
}
runtimes = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("cpu")},
        optional={"threads": st.integers(1, 64) | st.none(), "precision": st.sampled_from(["f32", "bf16"])},
    ),
    st.fixed_dictionaries(
        {"kind": st.just("tensorrt"), **gpu}, optional={"tensor_parallel": st.integers(1, 8)}
    ),
    st.fixed_dictionaries({"kind": st.just("pytorch"), **gpu}, optional={"cuda_graphs": st.booleans()}),
)
calibrations = st.fixed_dictionaries(
    {"dataset": st.sampled_from(["support", "local:/own.jsonl"])},
    optional={
        "samples": st.integers(128, 512),
        "seed": st.integers(0, 2**31 - 1),
        "allow_sample_count": st.booleans(),
    },
)
quantizations = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"format": st.sampled_from(["fp8", "int4_awq", "w4a8_awq", "int8_sq"]), "calibration": calibrations},
        optional={
            "kv_cache": st.sampled_from(["auto", "fp8"]),
            "gate": st.fixed_dictionaries({}, optional={"max_kl": st.floats(1e-9, 10) | st.none()}),
        },
    ),
    st.fixed_dictionaries(
        {"format": st.just("auto"), "calibration": calibrations, "auto": st.fixed_dictionaries(bits)},
        optional={"awq_block_size": st.sampled_from([64, 128])},
    ),
)
recipes = st.fixed_dictionaries(
    {
        "name": names,
        "model": st.fixed_dictionaries({"source": sources}, optional={"allow_pickle": st.booleans()}),
        "limits": st.fixed_dictionaries(
            {
                "max_input_tokens": st.integers(1, 10_000_000),
                "max_output_tokens": st.integers(17, 1_000_000),
                "max_concurrency": st.integers(1, 100),
            },
            optional={"max_batch_tokens": st.integers(1700, 1_000_000)},
        ),
    },
    optional={
        "draft": st.fixed_dictionaries({"source": sources, "max_draft_tokens": st.integers(1, 16)}),
        "runtime": runtimes,
        "quantization": quantizations,
        "slo": st.fixed_dictionaries({}, optional={"ttft_p95_ms": st.floats(1e-6, 1e9)}),
        "scheduler": st.fixed_dictionaries({}, optional={"max_queue_size": st.integers(0, 10)}),
        "cache": st.fixed_dictionaries({"enabled": st.booleans()}, optional={"ttl_s": st.integers(1, 10**6)}),
    },
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


def leaves(data: Data, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, key))


def sections(data: Data) -> list[tuple[str, ...]]:
    # Keys of `adapters` are names.
    return [
        (),
        *(path for path in leaves(data) if isinstance(at(data, path), dict) and path != ("adapters",)),
    ]


def at(data: Data, path: tuple[str, ...]) -> Any:
    for part in path:
        data = data[part]
    return data


def edited(data: Data, path: tuple[str, ...], value: Any) -> Data:
    data = copy.deepcopy(data)
    at(data, path[:-1])[path[-1]] = value
    return data


def outcome(file: Path, data: Data, *overrides: str) -> Recipe | set[tuple[str, str, str]]:
    """The recipe, or what is wrong with it, wherever that was said."""
    file.write_text(dump_yaml(data))
    try:
        return load_recipe(file, overrides)
    except InvalidInput as error:
        return {(fault.key, fault.problem.partition(" [")[0], fault.fix) for fault in error.faults}


@here
@given(data=recipes)
def test_round_trip(data: Data, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    recipe = outcome(file, data)
    assert isinstance(recipe, Recipe), recipe
    dumped = recipe.model_dump(mode="json")
    again = outcome(file, dumped)
    assert again == recipe
    assert isinstance(again, Recipe)
    assert again.model_dump(mode="json") == dumped
    assert hash(again) == hash(recipe)
    assert Recipe.model_validate(dumped) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


@here
@given(data=recipes, choice=st.data())
def test_overriding_is_editing(data: Data, choice: st.DataObject, tmp_path: Path) -> None:
    recipe = outcome(tmp_path / "r.yaml", data)
    assert isinstance(recipe, Recipe)
    full = recipe.model_dump(mode="json")
    path = choice.draw(st.sampled_from(list(leaves(full))), "key")
    value = choice.draw(values | st.just(at(full, path)), "value")
    text = dump_yaml(value).removesuffix("\n").removesuffix("\n...")
    overridden = outcome(tmp_path / "r.yaml", full, f"{'.'.join(path)}={text}")
    assert overridden == outcome(tmp_path / "r.yaml", edited(full, path, value))


@here
@given(data=recipes, choice=st.data(), key=names, value=scalars)
def test_unknown_keys_are_refused_anywhere(
    data: Data, choice: st.DataObject, key: str, value: object, tmp_path: Path
) -> None:
    recipe = outcome(tmp_path / "r.yaml", data)
    assert isinstance(recipe, Recipe)
    full = recipe.model_dump(mode="json")
    place = (*choice.draw(st.sampled_from(sections(full)), "section"), f"x{key.replace('.', '_')}")
    file = tmp_path / "r.yaml"
    file.write_text(dump_yaml(edited(full, place, value)))
    with pytest.raises(InvalidInput) as caught:
        load_recipe(file)
    (fault,) = caught.value.faults
    assert fault.key == ".".join(place)
    assert fault.problem == "is not a key"
    assert fault.line is not None
    assert place[-1] in file.read_text().splitlines()[fault.line - 1]


@here
@given(data=recipes, choice=st.data(), value=values)
def test_any_value_anywhere_is_taken_or_refused_with_its_place(
    data: Data, choice: st.DataObject, value: object, tmp_path: Path
) -> None:
    path = choice.draw(st.sampled_from(list(leaves(data))), "key")
    changed = edited(data, path, value)
    result = outcome(tmp_path / "r.yaml", changed)
    try:
        Recipe.model_validate(changed, context={"datasets": ["support", "cnn_dailymail"]})
    except ValidationError:
        assert not isinstance(result, Recipe)
        assert result
    else:
        assert isinstance(result, Recipe)


@here
@given(raw=st.binary() | st.text().map(str.encode) | st.text("{}[]:,-&*#!|>'\"%@`\n \tab1?").map(str.encode))
def test_any_file_is_read_or_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(raw)
    with pytest.raises(InvalidInput) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert all(fault.line is not None for fault in caught.value.faults)


@here
@given(override=st.text() | st.text("abc.={}[]: \n&*"))
def test_any_override_is_taken_or_refused(override: str) -> None:
    with contextlib.suppress(InvalidInput):
        load_recipe(packaged()["tiny-cpu"], [override])


@here
@given(value=st.dictionaries(st.text(), values, max_size=4))
def test_yaml_round_trip(value: Data) -> None:
    document = read_document(dump_yaml(value).encode(), "r.yaml")
    assert document.faults == []
    assert repr(document.data) == repr(value)
