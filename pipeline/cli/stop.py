"""`pipeline stop`: end deployments when their requests under way are completed."""

from __future__ import annotations

from dataclasses import asdict

import click

from pipeline.cli.options import Verb, complete_running, json_option, open_store
from pipeline.cli.output import note, print_json
from pipeline.errors import UserError
from pipeline.printable import printable

_KILLED_S = 5.0


@click.command(name="stop", cls=Verb)
@click.argument("names", nargs=-1, metavar="NAME…", shell_complete=complete_running)
@click.option("--all", "everything", is_flag=True, help="Stop all deployments of the store.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for requests under way; what still runs then is killed.",
)
@json_option
def command(names: tuple[str, ...], everything: bool, timeout_s: float, as_json: bool) -> None:
    """Stop the deployments NAMEs, gateway first, when the requests under way are completed.

    Deployments that one `pipeline serve` started end together. The command returns when all their processes have ended,
    including those that a killed supervisor left behind. Exit code 1 if a process had to be killed, or cannot be.

    \b
    pipeline stop tiny-cpu
    pipeline stop --all --timeout-s 10
    """
    from pipeline.serving.status import end_remaining, forget, list_deployments, stop_deployments

    if bool(names) == everything:
        raise click.UsageError("name the deployments, or give --all")
    running = open_store().running
    deployments = {status.name: status for status in list_deployments(running)}
    if unknown := sorted(set(names) - set(deployments)):
        known = f"running: {', '.join(deployments)}" if deployments else "nothing is served from this store"
        raise UserError(f"{', '.join(unknown)}: no such deployment; {known}")
    chosen = {name: deployments[name] for name in (deployments if everything else dict.fromkeys(names))}
    pids = {status.record.pid for status in chosen.values() if status.alive}
    together = {
        name: status.record
        for name, status in deployments.items()
        if status.alive and status.record.pid in pids
    }
    ended = []
    for stopped in stop_deployments(together, timeout_s, note):
        ended.append(stopped)
        if not as_json:
            how = "" if stopped.how == "drained" else f", killed after {timeout_s:g} s"
            click.echo(f"stopped {', '.join(stopped.names)} (process {stopped.pid}{how})")
    remaining = {name: stopped.remaining for stopped in ended for name in stopped.names}
    for name, status in chosen.items():
        if not status.alive:
            remaining[name] = end_remaining(status.record, note)
            if not remaining[name]:
                forget(running, status)
            if not as_json:
                click.echo(printable(f"{name} was {status.state}: {status.reason}"))
    if as_json:
        print_json([{**asdict(stopped), "names": list(stopped.names)} for stopped in ended])
    for stopped in ended:
        for name in stopped.names:
            if stopped.how == "killed" and not stopped.remaining:
                forget(running, deployments[name], wait_s=_KILLED_S)
    for name, left in remaining.items():
        if left:
            numbers = ", ".join(map(str, left))
            click.echo(f"{name}: processes that do not end, even when they are killed: {numbers}", err=True)
    if any(remaining.values()) or any(stopped.how == "killed" for stopped in ended):
        raise click.exceptions.Exit(1)
