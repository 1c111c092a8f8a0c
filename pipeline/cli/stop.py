"""`pipeline stop`: end deployments, after what they have under way."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from pipeline.cli.options import complete_running, json_option, store_option
from pipeline.cli.output import note, print_json
from pipeline.errors import UserError
from pipeline.printable import printable

_KILLED_S = 5.0


@click.command(name="stop")
@click.argument("names", nargs=-1, metavar="NAME…", shell_complete=complete_running)
@click.option("--all", "everything", is_flag=True, help="Stop all deployments of the store.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for requests under way; then it is killed.",
)
@store_option
@json_option
def command(
    names: tuple[str, ...], everything: bool, timeout_s: float, store: Path | None, as_json: bool
) -> None:
    """Stop the deployments NAMEs, gateway first, when the requests under way are completed.

    What one `pipeline serve` started together ends together. It returns when all processes of it have ended, also those
    that a supervisor left which was killed. Exit code 1 if something had to be killed, or cannot be.

    \b
    pipeline stop tiny-cpu
    pipeline stop --all --timeout-s 10
    """
    from pipeline.serving.status import end_remaining, forget, list_deployments, stop_deployments
    from pipeline.store import Store

    if bool(names) == everything:
        raise click.UsageError("name the deployments, or give --all")
    shelf = Store.at(store)
    found = {one.name: one for one in list_deployments(shelf.running)}
    if unknown := sorted(set(names) - set(found)):
        known = f"served are {', '.join(found)}" if found else "nothing is served from this store"
        raise UserError(f"{', '.join(unknown)}: no such deployment; {known}")
    chosen = {name: found[name] for name in (found if everything else dict.fromkeys(names))}
    pids = {one.record.pid for one in chosen.values() if one.alive}
    together = {name: one.record for name, one in found.items() if one.alive and one.record.pid in pids}
    ended = []
    for one in stop_deployments(together, timeout_s, note):
        ended.append(one)
        if not as_json:
            how = "" if one.how == "drained" else f", killed after {timeout_s:g} s"
            click.echo(f"stopped {', '.join(one.names)} (process {one.pid}{how})")
    remaining = {name: one.remaining for one in ended for name in one.names}
    for name, status in chosen.items():
        if not status.alive:
            remaining[name] = end_remaining(status.record, note)
            if not remaining[name]:
                forget(shelf.running, status)
            if not as_json:
                click.echo(printable(f"{name} was {status.state}: {status.reason}"))
    if as_json:
        print_json([{**asdict(one), "names": list(one.names)} for one in ended])
    for one in ended:
        for name in one.names:
            if one.how == "killed" and not one.remaining:
                forget(shelf.running, found[name], wait_s=_KILLED_S)
    for name, left in remaining.items():
        if left:
            numbers = ", ".join(map(str, left))
            click.echo(f"{name}: processes that do not end, even when they are killed: {numbers}", err=True)
    if any(remaining.values()) or any(one.how == "killed" for one in ended):
        raise click.exceptions.Exit(1)
