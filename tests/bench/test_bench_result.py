"""The JSON of a run: its checked-in schema, and files that are not one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from pipeline.bench import result as results
from pipeline.bench.load_settings import Load, LoadSettings
from pipeline.bench.result import BenchResult, LevelResult, SloCheck, json_schema
from pipeline.bench.run import find_limit, run_bench
from pipeline.bench.subject import Subject
from pipeline.bench.verdict import verdict, warnings
from pipeline.client.testing import FakeServer, Reply
from pipeline.errors import InvalidInput
from pipeline.progress import Silent
from pipeline.recipe import Slo
from tests.support import CHECKPOINTS

SCHEMA = Path(results.__file__).with_name("result.schema.json")


@pytest.fixture(scope="module")
def result() -> BenchResult:
    """A sweep to the end, with words at random."""
    with FakeServer(Reply("abc")) as server:
        subject = Subject(
            name="fake",
            way="triton",
            url=server.url,
            model="tensorrt_llm_bls",
            tokenizer=CHECKPOINTS / "support-target",
            max_prompt=100,
            max_answer=20,
            slo=Slo(ttft_p95_ms=1e6),
        )
        settings = LoadSettings(concurrency=(2,), requests=16, warmup_s=0)
        found = run_bench(subject, settings, Silent(), sweep_to=8)
        lengths = {request.tensors["max_tokens"][0] for request in server.requests}
        assert lengths == {20}
        assert len({request.prompt for request in server.requests}) == len(server.requests)
    return found


def test_the_schema_is_the_one_that_is_checked_in(result: BenchResult, tmp_path: Path) -> None:
    assert SCHEMA.read_text(encoding="utf-8") == json_schema()
    result.write(tmp_path / "result.json")
    jsonschema.validate(json.loads((tmp_path / "result.json").read_text()), json.loads(json_schema()))
    assert BenchResult.read(tmp_path / "result.json") == result


def test_a_sweep_ends_where_it_was_told_to(result: BenchResult) -> None:
    assert [str(level.load) for level in result.levels] == ["2 at a time", "4 at a time", "8 at a time"]
    assert result.broke_at is None
    assert verdict(result)[0] == "good"
    assert any("too few requests" in warning for warning in warnings(result))


def test_what_is_no_result_is_refused_with_all_that_is_wrong(result: BenchResult, tmp_path: Path) -> None:
    broken = json.loads(result.model_dump_json(by_alias=True)) | {"schema": "other", "seed": "x", "more": 1}
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    with pytest.raises(InvalidInput) as caught:
        BenchResult.read(tmp_path / "broken.json")
    assert {fault.key for fault in caught.value.faults} == {"schema", "seed", "more"}


@pytest.mark.parametrize(
    ("breaks_at", "most", "tried", "broke_at"),
    [
        (1, 64, [1], 1),
        (6, 64, [1, 2, 4, 5, 6, 8], 6),
        (64, 64, [1, 2, 4, 8, 16, 32, 48, 56, 60, 64], 64),
        (65, 50, [1, 2, 4, 8, 16, 32, 50], None),
    ],
)
def test_a_sweep_narrows_down_where_the_slo_breaks(
    result: BenchResult, breaks_at: int, most: int, tried: list[int], broke_at: int | None
) -> None:
    loads = []

    async def measure(load: Load) -> LevelResult:
        loads.append(load.value)
        missed = SloCheck(target="ttft_p95_ms", wanted=1, measured=2, met=load.value < breaks_at)
        return result.levels[0].model_copy(update={"value": load.value, "slo": (missed,)})

    assert asyncio.run(find_limit(Load("concurrency", 1), most, measure)) == broke_at
    assert sorted(loads) == tried
