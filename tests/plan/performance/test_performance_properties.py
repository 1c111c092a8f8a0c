"""What must hold of any forecast, whatever the constants: more hardware is never slower, more work never quicker."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contracts.gpus import gpu_rates, gpus
from pipeline.contracts.models import known_model
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance import EngineSpeed, Workload
from pipeline.plan.performance.engine import SpeculativeEngine, best_length, tokens_per_round
from pipeline.plan.performance.service import Service, token_cost

DENSE, EXPERTS, SMALL = (
    "meta-llama/Llama-3.3-70B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "meta-llama/Llama-3.2-1B-Instruct",
)


def sizes(name: str) -> ModelSizes:
    found = known_model(name)
    assert found is not None
    return found


def engine(
    name: str = DENSE, *, device: str = "h100-sxm-80g", ways: int = 4, form: str = "fp8", **more: int
) -> EngineSpeed:
    need = ModelSpec("target", sizes(name), Parallelism(tensor=ways), form, "fp8", **more)
    return EngineSpeed.of(need, device, "pytorch")


@pytest.fixture(params=[DENSE, EXPERTS])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@given(st.floats(1.0, 4.0), st.integers(1, 512), st.integers(16, 32_768))
def test_more_bandwidth_or_arithmetic_is_never_slower(factor: float, batch: int, tokens: int) -> None:
    base = engine()
    faster = (
        replace(base.rates, memory_gb_s=base.rates.memory_gb_s * factor),
        replace(base.rates, tflops={name: value * factor for name, value in base.rates.tflops.items()}),
        replace(base.rates, nvlink_gb_s=base.rates.nvlink_gb_s * factor),
    )
    for peaks in faster:
        better = replace(base, rates=peaks)
        assert better.decode(batch, tokens) <= base.decode(batch, tokens)
        assert better.first_token(tokens) <= base.first_token(tokens)


def test_tokens_are_not_quicker_in_larger_batches(model: str) -> None:
    one = engine(model)
    for work in (Workload(1000, 500), Workload(20_000, 200), Workload(16, 2000)):
        loads = [Service(one).at(batch, work) for batch in (1, 2, 3, 7, 16, 33, 64, 200, 512, 2000)]
        for before, after in pairwise(loads):
            assert after.itl_ms >= before.itl_ms
            assert after.ttft_ms >= before.ttft_ms


@given(st.integers(1, 100_000), st.integers(1, 100_000))
def test_a_longer_prompt_takes_no_less(first: int, second: int) -> None:
    short, long = sorted((first, second))
    one = engine()
    assert one.first_token(short) <= one.first_token(long) * (1 + 1e-9)
    assert one.prefill(4, short) > 0


def test_a_prompt_in_pieces_takes_no_less_than_whole() -> None:
    whole, pieces = engine(step_tokens=8192), engine(step_tokens=512)
    assert pieces.first_token(8192) >= whole.first_token(8192)
    assert pieces.mixed_step(8, Workload(8192, 500))[0] < whole.mixed_step(8, Workload(8192, 500))[0]


def test_a_prompt_that_may_not_be_split_holds_up_the_others_for_longer() -> None:
    split = engine(step_tokens=1024)
    whole = replace(split, chunked=False)
    work = Workload(8192, 500)
    assert whole.mixed_step(8, work)[0] > split.mixed_step(8, work)[0]
    assert whole.first_token(8192) < split.first_token(8192)
    assert whole.first_token(1000) == split.first_token(1000)


def test_sharing_layers_is_quicker_until_the_links_decide() -> None:
    linked = [engine(ways=ways, device="h100-sxm-80g").decode(8, 1000) for ways in (1, 2, 4, 8)]
    assert linked == sorted(linked, reverse=True)
    # A small model over PCIe spends its time exchanging.
    small = [engine(SMALL, ways=ways, device="l40s-48g", form="none") for ways in (1, 8)]
    assert small[1].decode(1, 100) > small[0].decode(1, 100)


def test_without_acceptance_a_draft_only_costs() -> None:
    target, draft = engine(), engine(SMALL)
    assert SpeculativeEngine(target, draft, 5, 0.0).gain(1, 1000) < 1
    gains = [SpeculativeEngine(target, draft, 5, share / 10).gain(1, 1000) for share in range(11)]
    assert gains == sorted(gains)
    assert gains[-1] < 6
    assert SpeculativeEngine(target, draft, 5, 0.8).gain(512, 1000) < SpeculativeEngine(
        target, draft, 5, 0.8
    ).gain(1, 1000)


def test_more_acceptance_is_worth_longer_proposals() -> None:
    lengths = [best_length(engine(), engine(SMALL), share / 10, 1, 1000) for share in range(1, 10)]
    assert lengths == sorted(lengths)


@given(st.floats(0, 0.99), st.integers(0, 64))
def test_tokens_of_a_round_are_the_closed_form(acceptance: float, proposed: int) -> None:
    closed = (1 - acceptance ** (proposed + 1)) / (1 - acceptance)
    assert tokens_per_round(acceptance, proposed) == pytest.approx(closed)
    assert tokens_per_round(1.0, proposed) == proposed + 1


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_cost_scales_with_the_price_and_its_parts_pay_for_all(price: float, factor: float) -> None:
    work = Workload(1000, 250)
    load = Service(engine()).at(32, work)
    once, more = token_cost(load, work, 4, price), token_cost(load, work, 4, price * factor)
    assert more.per_million_output == pytest.approx(once.per_million_output * factor)
    paid = once.input_part * work.prompt_tokens + once.output_part * work.output_tokens
    assert paid == pytest.approx(once.per_million_output * work.output_tokens)
    assert 0 < load.prompt_share < 1


@given(st.integers(1, 400), st.integers(1, 400))
def test_a_looser_slo_lets_in_no_fewer(first: int, second: int) -> None:
    service, work = Service(engine()), Workload(2000, 300)
    tight, loose = sorted((first, second))
    few, _ = service.most_within(work, 256, None, float(tight))
    many, ended = service.most_within(work, 256, None, float(loose))
    assert (few.batch if few else 0) <= (many.batch if many else 0)
    if many is not None and many.batch < 256:
        assert ended == "itl"
        assert service.at(many.batch + 1, work).itl_p95_ms > loose
        assert many.itl_p95_ms <= loose


@settings(deadline=None)
@given(st.integers(1, 32_768), st.integers(1, 4096), st.integers(1, 8), st.floats(0, 1))
def test_a_forecast_has_no_more_requests_than_its_steps_keep_up_with(
    prompt: int, output: int, proposed: int, acceptance: float
) -> None:
    """Tokens that sequences and the prompts of their successors put into a step, against those that it takes."""
    one, work = engine(), Workload(prompt, output)
    drafted = Service(one, SpeculativeEngine(one, engine(SMALL), proposed, acceptance))
    for service, each, progress in (
        (Service(one), 1, 1.0), (drafted, proposed + 1, tokens_per_round(acceptance, proposed)),
    ):  # fmt: skip
        most = service.most_decoding(work)
        assert most >= 1
        assert (most + 1) * (each + progress * prompt / output) > one.step_tokens * (1 - 1e-9)
        assert most == 1 or most * (each + progress * prompt / output) <= one.step_tokens * (1 + 1e-9)
        load, ended = service.most_within(work, 10**6, None, None)
        assert load is not None
        assert (load.batch, ended) == (most, "steps")
        assert max(at.batch for at in service.curve(work, 10**6)) == most


@pytest.mark.parametrize("one", [gpu_rates(one.name) for one in gpus()], ids=lambda one: str(one.gpu))
def test_every_gpu_has_constants(one) -> None:  # type: ignore[no-untyped-def]
    quick = engine(SMALL, device=one.gpu, ways=1, form="none")
    assert 0 < quick.decode(1, 100) < 0.1
    assert 0 < quick.first_token(1000) < 1


def test_experts_that_no_token_chooses_are_not_read() -> None:
    load = engine(EXPERTS, form="none").load
    assert load.expert_share(1) == pytest.approx(2 / 8)
    assert load.expert_share(4) < load.expert_share(64) <= 1
    assert engine(DENSE).load.expert_share(10) == 0
