"""For all tests."""

import signal

import pytest
from hypothesis import HealthCheck, settings

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


# Folders whose files take long: with them first, no process is left alone with one at the end.
LONG = ("e2e", "triton", "deploy", "stages", "runtimes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: LONG.index(folder) if (folder := item.path.parent.name) in LONG else len(LONG)
    )
