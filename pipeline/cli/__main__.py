"""The program `pipeline`, also as `python -m pipeline.cli`. Ctrl-C while it is imported ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline.cli.main import program

    program()


if __name__ == "__main__":
    main()
