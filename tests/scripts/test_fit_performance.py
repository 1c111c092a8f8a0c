"""scripts/fit_performance: figures of one kind are computed in one go, and come out as each does alone."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.plan.performance.accuracy import simulate_figure
from pipeline.plan.performance.published import figures
from pipeline.plan.performance.queueing import LoadTrace

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader("fit_performance", str(ROOT / "scripts" / "fit_performance"))
    module = module_from_spec(spec_from_loader(loader.name, loader) or pytest.fail("no such script"))
    monkeypatch.setitem(sys.modules, loader.name, module)
    loader.exec_module(module)
    return module


def test_figures_in_one_go_are_as_each_alone(script: ModuleType) -> None:
    given = script.constants(script.stored() * script.SCALE)
    few = [figure for figure in figures() if figure.context is None and figure.kind == "fixed-batch"][::12]
    traces = {figure: LoadTrace.of(simulate_figure(figure, given)) for figure in few}
    together = script.errors(traces, given)
    assert len(together) >= len(few) > 3
    for figure, trace in traces.items():
        for key, value in script.errors({figure: trace}, given).items():
            assert together[key] == pytest.approx(value)
