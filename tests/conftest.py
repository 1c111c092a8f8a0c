"""For all tests."""

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.support.rewriting import rewrite_share

# Models of tests are small: two threads of torch would wait for each other most of the time, busily.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test depends on how fast the machine is, and two runs of one commit judge the same examples.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
# Other examples at each run, and more of them: scripts/test --hypothesis-profile=explore
settings.register_profile(
    "explore", settings.get_profile("default"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("default")


def pytest_configure() -> None:
    """A job that a script starts in the background ignores Ctrl-C, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of the tier `models` import torch, for seconds in each process: without that tier, they are left out."""
    if "not models" not in config.getoption("markexpr") or collection_path.suffix != ".py":
        return None
    return b"\npytestmark = pytest.mark.models" in collection_path.read_bytes() or None


def pytest_collection(session: pytest.Session) -> None:
    """Modules that tests import live as long as the process: they are not looked through for garbage."""
    gc.disable()
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and not sys.dont_write_bytecode:
        rewrite_share(session.config, int(worker[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # else a twentieth of the processor time goes to it
    gc.enable()


# What tests share that a process makes once, and the files that share it: each group stays in one process.
TOGETHER = {
    "ModelOpt, transformers and torch": (
        "tests/stages/", "tests/runtimes/test_cpu_ir_", "tests/runtimes/test_cpu_engine_context_logits",
        "tests/runtimes/test_cpu_engine_processor", "tests/models/test_chat_template", "tests/models/test_sandbox",
        "tests/scripts/test_tiny_checkpoints",
    ),
    "the checked-in pair as OpenVINO models": ("tests/runtimes/test_cpu_engine_",),
    "a store in which tiny-cpu is served, and Triton's usual ports": ("tests/e2e/",),
}  # fmt: skip
# They come first, and files that take long after them, so that no process is left alone with one at the end.
LONG = (*sum(TOGETHER.values(), ()), "tests/serving/", "tests/runtimes/")


class Scheduling(LoadFileScheduling):
    """`--dist loadfile`, with the files of a group as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        return next(
            (group for group, files in TOGETHER.items() if nodeid.startswith(files)), nodeid.split("::")[0]
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # files with few tests may well be the long ones
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next(
            (at for at, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG)
        )
    )
