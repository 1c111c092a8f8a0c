"""What a machine lacks is said before a build fetches anything, and only of what it is to do itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import InvalidInput
from pipeline.machine.gpus import GpuSurvey
from pipeline.machine.host import Memory
from pipeline.machine.inventory import Inventory
from pipeline.prepare import facts, prepare
from pipeline.recipe import load_recipe
from pipeline.runtimes import ExecutorChoice
from pipeline.store import Store
from tests.support.machines import GIB, H100, h100s

RECIPE = "llama-3.1-8b-fp8"  # its revisions are commits: nobody is asked for them
L4 = replace(H100, name="NVIDIA L4", sm=89, memory_mib=23034, free_mib=23000)
NO_GPU = GpuSurvey((), "there is no nvidia-smi", "")

Judge = Callable[..., tuple[str, ...]]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    """Rules of the warnings about a build of the recipe on a machine, which may be refused."""
    store = Store(tmp_path / "store")
    roomy = replace(facts.read_disk(tmp_path), free_bytes=4000 * GIB)
    monkeypatch.setattr(facts, "read_disk", lambda _: roomy)

    def judge(machine: Inventory, executor: str = "native", until: str = "package") -> tuple[str, ...]:
        monkeypatch.setattr(facts, "take", lambda **_: machine)
        facts._hardware.cache_clear()
        prepared = prepare(load_recipe(RECIPE), store, offline=True)
        choice = ExecutorChoice(executor)  # type: ignore[arg-type]
        found = prepared.check_fit(store, choice, until)
        return tuple(finding.rule for finding in found if finding.rule.startswith(("host.", "port.")))

    yield judge
    facts._hardware.cache_clear()


def test_nothing_is_said_of_a_machine_that_fits(judge: Judge) -> None:
    assert judge(h100s(1)) == ()


def test_another_gpu_is_refused_unless_another_machine_compiles(judge: Judge) -> None:
    machine = replace(h100s(1), gpus=GpuSurvey((L4,), "", "NVML"))
    with pytest.raises(InvalidInput, match=r"NVIDIA L4 .*compute capability 8\.9.*\[port\.arch\]"):
        judge(machine)
    assert "port.arch" not in judge(machine, executor="print")
    assert "port.arch" not in judge(machine, until="calibrate.target")


def test_an_old_driver_is_refused(judge: Judge) -> None:
    old = replace(h100s(1), gpus=GpuSurvey((replace(H100, driver="535.104.05"),), "", "NVML"))
    with pytest.raises(InvalidInput, match=r"driver 535\.104\.05 is older than"):
        judge(old)


def test_memory_to_calibrate_counts_where_this_machine_calibrates(judge: Judge) -> None:
    laptop = replace(h100s(0), gpus=NO_GPU, memory=Memory(16 * GIB, 15 * GIB, 0, None))
    with pytest.raises(InvalidInput, match=r"29\.9 GiB of memory to calibrate on a CPU, 15\.0 GiB are free"):
        judge(laptop, executor="print")
    assert judge(laptop, until="fetch.target") == ()
    workstation = replace(laptop, memory=Memory(64 * GIB, 60 * GIB, 0, None))
    assert judge(workstation, executor="print") == ()


def test_a_driver_that_cannot_be_asked_is_left_to_the_builder(judge: Judge) -> None:
    assert judge(replace(h100s(0), gpus=NO_GPU)) == ()


def test_little_memory_to_compile_is_a_warning(judge: Judge) -> None:
    small = replace(h100s(1), memory=Memory(24 * GIB, 23 * GIB, 0, None))
    assert judge(small) == ("host.memory",)
