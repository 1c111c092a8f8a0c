"""For all tests."""

import signal


def pytest_configure() -> None:
    """A job that a script starts in the background ignores Ctrl-C, and so would all that tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
