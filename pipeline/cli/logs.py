"""`pipeline logs`: the logs of a deployment's Triton, gateway and supervisor."""

from __future__ import annotations

from collections.abc import Iterable

import click

from pipeline.cli.options import Verb, complete_running, open_store
from pipeline.errors import UserError
from pipeline.printable import printable

_FILES = {"triton": "triton", "gateway": "gateway", "supervisor": "serve"}


@click.command(name="logs", cls=Verb)
@click.argument("name", metavar="NAME", shell_complete=complete_running)
@click.argument("wanted", metavar="[triton|gateway|supervisor]...", nargs=-1, type=click.Choice(list(_FILES)))
@click.option(
    "-f", "--follow", is_flag=True, help="Go on printing until Ctrl-C, or until the deployment ends."
)
@click.option(
    "--lines",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    metavar="N",
    help="Lines of the end of each log to print first.",
)
def command(name: str, wanted: tuple[str, ...], follow: bool, lines: int) -> None:
    """Print the end of the logs of deployment NAME, all of them or those that are named, even after it has ended.

    The supervisor's log, which a detached `pipeline serve` writes, has starts, failures and restarts. Where several
    logs are printed, each line begins with the name of its log.

    \b
    pipeline logs tiny-cpu
    pipeline logs tiny-cpu gateway -f
    """
    from pipeline.serving.log_files import LogTail
    from pipeline.triton.running import RunningServer

    opened = open_store()
    record = RunningServer.read(opened.running, name)
    folder = opened.logs / name
    files = {
        "triton": folder / "triton.log",
        "gateway": folder / "gateway.log",
        "serve": folder / "serve.log",
    }
    if record is not None:
        files |= {"triton": record.log or files["triton"], "gateway": record.gateway_log or files["gateway"]}
        if record.control is not None:
            # Deployments that were started together have one supervisor, and it bears the name of the first.
            files["serve"] = opened.logs / record.control.stem / "serve.log"
    kinds = {_FILES[program] for program in wanted} or set(files)
    chosen = {kind: file for kind, file in files.items() if kind in kinds}
    if not any(file.is_file() for file in chosen.values()):
        if record is None and not folder.is_dir():
            names = ", ".join(sorted(path.name for path in opened.logs.glob("*/")))
            raise UserError(f"{name}: no such deployment; logs are here of {names or 'none'}")
        raise UserError(f"{name} has no such log here: {', '.join(map(str, chosen.values()))}")
    tail = LogTail(chosen, lines)
    several = len(chosen) > 1
    width = max(map(len, chosen))

    def show(new: Iterable[tuple[str, str]]) -> None:
        for kind, line in new:
            shown = printable(line, colours=True)
            click.echo(f"{kind:<{width}} | {shown}" if several else shown)

    try:
        show(tail.read())
        while follow and record is not None and record.alive:
            tail.wait()
            show(tail.read())
    finally:
        show(tail.close())
