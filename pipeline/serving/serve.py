"""Serve packages until told to stop: checked against this machine, started, announced, supervised, ended.

By processes of this machine, or by a container (`launch_*` has the commands, `server.TritonServer` the process), with a
gateway in front of them if the caller gives its command line. While they run they are announced in `<store>/running/`,
so that clients find them by the names of their recipes, and checked by real inference: Triton reports itself ready even
when the process of a model is dead.

A Ctrl-C ends everything in this order: `stop` is set, `Supervisor.run` stops its keepers, they end the gateway and
`machine/process_guard.py`, and the guard ends the processes of the server. After a `kill -9` of this process, the
kernel kills the gateway, and the guard sees the end of its standard input.
"""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from pipeline.progress import Progress
from pipeline.serving.announcement import Announcement
from pipeline.serving.control import ControlServer
from pipeline.serving.gateway_process import GatewayLaunch, GatewayProcess
from pipeline.serving.launch import ServeOptions
from pipeline.serving.rollouts import Rollouts
from pipeline.serving.supervisor import Supervisor
from pipeline.serving.triton_component import TritonComponent, log_file, make_triton
from pipeline.triton.running import RunningServer


def serve(
    packages: Sequence[tuple[Path, ServeOptions]],
    progress: Progress,
    stop: threading.Event,
    *,
    gateway: GatewayLaunch | None = None,
    ready_file: Path | None = None,
    stopped_by: str = "Ctrl-C",
) -> None:
    """Serve packages until `stop` is set.

    A package is ready when it answers, and all its files are those that were built; weights that have to be read for
    that are read while they are loaded.

    Args:
        packages: Folders with deployment.json and model_repository/, each with its options. The store is that of
            the first.
        stop: Ends everything when it is set, also while it starts.
        gateway: Gateway in front of them; None for none.
        ready_file: File that is there while everything is ready; see `pipeline.serving.health`.
        stopped_by: Command that ends it, for a reader.

    Raises:
        InvalidInput: The machine does not fit; all reasons at once.
        UserError: The package cannot be served this way, or a server for this recipe runs already.
        DamagedArtifact: Files of the package are not those that were built.
        ServerError: Something did not start, or failed too often where the policy gives up (`RestartsExhausted`).
    """
    first = packages[0][1]
    tritons = [make_triton(package, options, progress) for package, options in packages]
    components = ("triton",) if gateway is None else ("triton", "gateway")
    gateway_log = log_file(first, tritons[0].name, "gateway.log") if gateway is not None else None
    control_path = None if first.running is None else first.running / f"{tritons[0].name}.sock"
    began = time.monotonic()
    with ExitStack() as stack:
        announcements = {}
        for triton in tritons:
            record = RunningServer.of(
                triton.addresses,
                triton.package,
                state="starting",
                gateway_url="" if gateway is None else gateway.url,
                log=triton.server.log_file.absolute(),
                gateway_log=gateway_log,
                control=control_path,
                recipe=triton.options.recipe,
                settings=triton.options.settings,
            )
            announcement = Announcement(
                first.running, triton.name, record, components,
                ready_file=ready_file, entry_model=triton.server.entry_model,
            )  # fmt: skip
            # Undone when another one of them is served already.
            stack.callback(announcement.withdraw)
            announcement.claim(progress, needed=gateway is not None)
            announcements[triton.name] = announcement
        process = None
        if gateway is not None:
            assert gateway_log is not None, "it was made for it"
            process = GatewayProcess(gateway, gateway_log)
            stack.callback(process.close)
        supervisor = Supervisor(
            {triton.name: (triton, announcements[triton.name]) for triton in tritons},
            process,
            {triton.name: triton.options.restart for triton in tritons},
            progress,
            stop,
        )
        Rollouts(supervisor, make_triton, progress)
        control = _open_control(control_path, supervisor, progress, stack)
        supervisor.run(
            lambda: progress.say(
                _ready_text(tritons, gateway, gateway_log, stopped_by, time.monotonic() - began)
            ),
            control,
        )
    progress.say("stopped " + ", ".join(f"Triton for {triton.name}" for triton in tritons))


def stop_on_signals() -> threading.Event:
    """Make an event that SIGINT and SIGTERM set from now on; to be called when there is a server to stop.

    Before, while a package is built, both signals end the command at once as they end `pipeline build`. So does a
    second SIGINT; what the command has started ends with it.
    """
    stop = threading.Event()

    def end(number: int, _frame: FrameType | None) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop


def _open_control(
    path: Path | None, supervisor: Supervisor, progress: Progress, stack: ExitStack
) -> ControlServer | None:
    if path is None or not path.parent.is_dir():
        return None
    try:
        return stack.enter_context(ControlServer(path, supervisor.handlers))
    except OSError as error:
        progress.say(f"{path} cannot be made ({error.strerror}): this server takes signals only")
        return None


def _ready_text(
    tritons: Sequence[TritonComponent],
    gateway: GatewayLaunch | None,
    gateway_log: Path | None,
    stopped_by: str,
    took_s: float,
) -> str:
    """Write the addresses, and a line to paste for each kind of client."""
    lines = [f"ready after {took_s:.1f} s"]
    for triton in tritons:
        lines += triton.lines(stopped_by)
    if gateway is not None:
        lines.append(f"OpenAI API: {gateway.url}/v1   page: {gateway.url}/   log: {gateway_log}")
        lines += openai_lines(gateway.url, tritons[0].name, needs_key=gateway.needs_key)
    return "\n  ".join(lines)


def openai_lines(url: str, model: str, *, needs_key: bool) -> tuple[str, str]:
    """Make lines for a shell that ask a gateway: by curl, and by OpenAI's own Python package.

    An API key that is needed is taken from $OPENAI_API_KEY.
    """
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True})
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    api_key = "" if needs_key else ", api_key='none'"
    code = (
        f"from openai import OpenAI; print(OpenAI(base_url='{url}/v1'{api_key}).chat.completions.create("
        f"model='{model}', messages=[{{'role': 'user', 'content': 'Hello'}}]).choices[0].message.content)"
    )
    return (
        f"curl: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
        f'openai: python -c "{code}"',
    )
