"""`pipeline gateway`: an OpenAI-compatible server in front of running deployments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from pipeline.cli.options import complete_deployment, set_option, store_option

if TYPE_CHECKING:
    from socket import socket

    from pipeline.gateway.metric_names import MetricNames
    from pipeline.gateway.prompt_log import PromptLog
    from pipeline.gateway.tenants import Tenants
    from pipeline.gateway.workers.worker import GatewayWorker, WorkerPlace
    from pipeline.recipe import Recipe
    from pipeline.serving.gateway_process import GatewayLaunch
    from pipeline.store import Store

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


_GIVEN = "pipeline.given"  # key of click's `Context.meta`: name of an option -> its words
Command = TypeVar("Command", bound=Callable[..., Any])


_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", default=8080, show_default=True, help="Port to listen on; 0 takes a free one."),
    click.option(
        "--keys",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Tenants with their API keys and limits (YAML); without it no key is needed.",
    ),
    click.option(
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        callback=lambda _, __, given: tuple(map(_host, given)),
        help="Host that requests may name besides loopback, such as gateway.example, *.example or * (any). "
        "Where --host is no loopback address, IP addresses are allowed, too.",
    ),
    click.option(
        "--allowed-origin",
        "allowed_origins",
        multiple=True,
        metavar="ORIGIN",
        callback=lambda _, __, given: tuple(map(_origin, given)),
        help="Web pages that may ask, such as https://chat.example, or * (any); by default only the gateway's own.",
    ),
    click.option(
        "--max-waiting",
        default=256,
        show_default=True,
        help="Requests that may wait for a model; more are answered by 429.",
    ),
    click.option(
        "--max-wait-s",
        type=click.FloatRange(min=0),
        default=30.0,
        show_default=True,
        help="Seconds that a request waits while a model is not ready, because its server is started again for "
        "example; then it is answered by 503.",
    ),
    click.option(
        "--idle-timeout-s",
        type=click.FloatRange(min=0),
        default=60.0,
        show_default=True,
        help="Seconds without a token after which an answer is given up and its request is told so; 0 is never.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Processes that serve the gateway together, with the same limits, queues and metrics; about one for each "
        "core that is to be used.",
    ),
    click.option(
        "--max-connections",
        type=click.IntRange(min=1),
        default=1024,
        show_default=True,
        help="Connections open at once, divided among the workers; beyond that, one without a request is closed, or "
        "else the new one.",
    ),
    click.option(
        "--drain-s", default=30, show_default=True, help="Seconds that requests may still take after a stop."
    ),
    click.option(
        "--batch-folder",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Folder of uploaded files and batches; by default batches/ in the store. Gateways that share it share "
        "their batches.",
    ),
    click.option(
        "--batch-slots",
        type=click.IntRange(min=1),
        metavar="N",
        help="Requests of batches that a model answers at once, in slots that other requests leave; by default half "
        "of its slots.",
    ),
    click.option(
        "--max-file-mib",
        type=click.IntRange(min=1),
        default=200,
        show_default=True,
        help="Largest file that may be uploaded, in MiB.",
    ),
    click.option(
        "--max-stored-mib",
        type=click.IntRange(min=1),
        default=4096,
        show_default=True,
        help="All files of a tenant together, in MiB; more are refused until some are deleted.",
    ),
    click.option(
        "--stored-responses",
        type=click.IntRange(min=0),
        default=1000,
        show_default=True,
        help="Responses of /v1/responses that are kept in memory for each tenant, for previous_response_id and "
        "GET /v1/responses/ID; the longest unused are forgotten first. 0 keeps none.",
    ),
    click.option(
        "--stored-responses-mib",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Most MiB of JSON that the kept responses of each tenant take.",
    ),
    click.option(
        "--stored-responses-s",
        type=click.FloatRange(min=0, min_open=True),
        default=3600.0,
        show_default=True,
        help="Seconds after which a response that nobody has used is forgotten.",
    ),
    click.option(
        "--traces",
        metavar="URL",
        help="OTLP/HTTP receiver for spans, such as http://localhost:4318; by default $OTEL_EXPORTER_OTLP_ENDPOINT. "
        "`pipeline serve` hands it to Triton, too.",
    ),
    click.option(
        "--metric-names",
        default="",
        metavar="NAMES",
        callback=lambda _, __, given: _metric_names(given),
        help="Show the metrics at /metrics under these names, too: vllm, gen_ai (OpenTelemetry's), or vllm,gen_ai.",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Format of the log line of each request, on standard error.",
    ),
    click.option(
        "--log-prompts",
        type=click.Choice(["no", "redacted", "full"]),
        default="no",
        show_default=True,
        help="Log the texts of prompts and answers, too. redacted: without those that hold keys, e-mail addresses, "
        "payment cards, bank accounts, national ids or telephone numbers.",
    ),
)


def gateway_options(command: Command) -> Command:
    """Where a gateway listens, who may ask, what it logs: for `gateway`, and for `serve`, which starts one."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class StartsGateway(click.Command):
    """A command with `gateway_options` that hands them on: it keeps the words that were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[_GIVEN] = given
        return super().parse_args(ctx, args)


@click.command(name="gateway", cls=StartsGateway)
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete_deployment)
@set_option
@store_option
@click.option(
    "--package",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Serve the model of this package, with --endpoint; a RECIPE beside it gives settings, such as its cache.",
)
@gateway_options
@click.option(
    "--endpoint",
    "endpoints",
    multiple=True,
    metavar="[NAME=]HOST:PORT",
    help="gRPC address of a Triton server elsewhere that runs a recipe, by its name unless there is one only. "
    "Repeat it for several servers.",
)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="S",
    help="Seconds to wait until `pipeline serve` runs the recipes. With --endpoint it starts at once; see /readyz.",
)
@click.option("--listen-fd", "descriptors", multiple=True, type=int, hidden=True)
@click.option("--parent", type=int, hidden=True)
@click.option("--worker", "place_word", hidden=True)
@click.option("--dry-run", is_flag=True, help="Print what would be served, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
@click.pass_context
def command(
    context: click.Context,
    /,
    recipes: tuple[str, ...],
    overrides: tuple[str, ...],
    store: Path | None,
    package: Path | None,
    host: str,
    port: int,
    endpoints: tuple[str, ...],
    wait_s: float,
    keys: Path | None,
    allowed_hosts: tuple[str, ...],
    allowed_origins: tuple[str, ...],
    max_waiting: int,
    max_wait_s: float,
    idle_timeout_s: float,
    workers: int,
    max_connections: int,
    drain_s: int,
    batch_folder: Path | None,
    batch_slots: int | None,
    max_file_mib: int,
    max_stored_mib: int,
    stored_responses: int,
    stored_responses_mib: int,
    stored_responses_s: float,
    traces: str | None,
    metric_names: tuple[MetricNames, ...],
    log_format: str,
    log_prompts: str,
    descriptors: tuple[int, ...],
    parent: int | None,
    place_word: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve the models of RECIPEs, which `pipeline serve` runs, by OpenAI's HTTP API: /v1/chat/completions and so on.

    `pipeline serve` starts one by itself; this is for one apart, on another machine or in front of several servers.

    \b
    pipeline serve tiny-cpu --no-gateway
    pipeline gateway tiny-cpu
    pipeline gateway --package /deployment --endpoint triton:8001
    curl localhost:8080/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "tiny-cpu", "messages": [{"role": "user", "content": "Hi"}]}'

    A page to chat is at /, figures are at /metrics. A file of keys looks like this:

    \b
    tenants:
      shop: {keys: [sk-shop-…], limits: {requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 16}}

    Each choice counts as a request: two prompts with n=3 are six. What is refused counts, too. Tenants that wait for
    the same model take turns.
    """
    from pipeline.machine.processes import die_with_parent
    from pipeline.store import Store

    if parent is not None and not die_with_parent(parent):
        return
    if not recipes and package is None:
        raise click.UsageError("name a RECIPE, or a folder with --package")
    artifacts = Store.at(store)
    _require_packages(_known_recipes(recipes, overrides, artifacts, wait_s=wait_s), artifacts, traces)
    from pipeline.cli.discovery import load_served_model, locate_models, read_kv_cache_usage, record_followers
    from pipeline.gateway.access_log import log_to_stderr
    from pipeline.gateway.app import Gateway
    from pipeline.gateway.batches.storage import BatchStorage, StorageLimits
    from pipeline.gateway.responses.stored_responses import StoredResponseLimits
    from pipeline.gateway.served_model import WaitLimits
    from pipeline.gateway.server import ConnectionLimits, GatewayServer, bound_sockets
    from pipeline.gateway.tenants import Tenants
    from pipeline.gateway.traces import make_tracer
    from pipeline.gateway.web import AllowedHosts
    from pipeline.gateway.workers.worker import WorkerPlace

    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    elsewhere: dict[str, list[str]] = {}
    for name, url in map(_endpoint, endpoints):
        elsewhere.setdefault(name, []).append(url)
    locate = partial(locate_models, recipes, overrides, artifacts, elsewhere, package=package)
    tenants = Tenants.load(keys) if keys else Tenants()
    if dry_run:
        described = [one.describe() for one in locate()]
        lines = [f"{name}: {value}" for one in described for name, value in one.items()]
        click.echo(json.dumps({"models": described}, indent=2) if as_json else "\n".join(lines))
        return
    log_to_stderr(as_json=log_format == "json")
    waits = WaitLimits(max_waiting, max_wait_s, idle_timeout_s or None, batch_slots)
    stored = StorageLimits(file_bytes=max_file_mib * 2**20, tenant_bytes=max_stored_mib * 2**20)
    place = None if place_word is None else WorkerPlace.of_word(place_word)
    with _inherited(descriptors) if descriptors else bound_sockets(host, port) as sockets:
        located = locate(wait_s=wait_s)
        hosts = AllowedHosts(host, allowed_hosts)
        exposed = place is None and not hosts.loopback
        if exposed and (advice := _advice(allowed_hosts, keys=tenants.require_keys)):
            click.echo(advice, err=True)
        say_ready = partial(_say_ready, [one.recipe.name for one in located], host, sockets[0])
        if workers > 1 and place is None:
            _run_workers(context, sockets, tenants, say_ready)
            return
        worker = None if place is None else _become_worker(place, tenants)
        load = partial(load_served_model, store=artifacts, waits=waits, worker=worker)
        models = {one.recipe.name: load(one) for one in located}
        followers = record_followers(located, artifacts, waits=waits, worker=worker)
        gateway = Gateway(
            models,
            tenants,
            hosts=hosts,
            origins=allowed_origins,
            tracer=make_tracer(traces),
            prompt_log=_prompt_log(log_prompts),
            metric_names=metric_names,
            followers=followers,
            stored_responses=StoredResponseLimits(
                stored_responses, stored_responses_mib * 2**20, stored_responses_s
            ),
            restarts=lambda: {follower.name: follower.restarts for follower in followers},
            kv_cache_usage=partial(read_kv_cache_usage, followers) if "vllm" in metric_names else dict,
            batches=BatchStorage(batch_folder or artifacts.root / "batches", stored),
            worker=worker,
        )
        limits = ConnectionLimits(connections=-(-max_connections // workers))
        server = GatewayServer(gateway, host, port, limits=limits, drain_s=drain_s)
        server.on_start = say_ready if worker is None else partial(worker.tell, "listens")
        server.run(sockets)


def _say_ready(names: Sequence[str], host: str, listening: socket) -> None:
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    click.echo(f"gateway for {', '.join(names)}: {url}/v1   page: {url}/   stop: Ctrl-C")


def _become_worker(place: WorkerPlace, tenants: Tenants) -> GatewayWorker:
    """Share what the workers of a gateway share: limits and metrics from now on, the rest when the gateway starts."""
    from pipeline.gateway.metrics import share_metrics
    from pipeline.gateway.workers.shared_usage import SharedUsage
    from pipeline.gateway.workers.worker import GatewayWorker

    SharedUsage(place.usage, tenants, place.workers).share(place.number)
    share_metrics(place.metrics, place.number)
    return GatewayWorker(place)


def _run_workers(
    context: click.Context, sockets: Sequence[socket], tenants: Tenants, on_ready: Callable[[], None]
) -> None:
    """Serve by several processes of this command."""
    import tempfile

    from pipeline.gateway.workers.pool import WorkerPool

    values = context.params
    words = given_words(context, without={"keys", "descriptors", "parent", "place_word"})
    for one in sockets:
        words += ["--listen-fd", str(one.fileno())]
    with tempfile.TemporaryFile() as keys:
        if values["keys"]:
            # A worker that is started again must know the same tenants.
            keys.write(values["keys"].read_bytes())
            keys.flush()
            words += ["--keys", f"/dev/fd/{keys.fileno()}"]

        def command(place: WorkerPlace) -> Sequence[str]:
            return (
                *(sys.executable, "-m", "pipeline.cli.main", "gateway"),
                *(*values["recipes"], *words),
                *("--parent", str(os.getpid()), "--worker", place.as_word()),
            )

        pool = WorkerPool(
            sockets,
            command,
            values["workers"],
            tenants=tenants,
            max_waiting=values["max_waiting"],
            batch_slots=values["batch_slots"],
            drain_s=values["drain_s"],
            on_ready=on_ready,
            inherit=(keys.fileno(),),
        )
        pool.run()


@contextmanager
def gateway_command(
    context: click.Context, recipes: Sequence[Recipe], store: Store
) -> Iterator[GatewayLaunch]:
    """Bind the sockets of a gateway that `serve` starts, and make its command line.

    Args:
        context: Of a `StartsGateway` command, whose options are handed on.
        recipes: What is served; their servers are announced in `store`, where the gateway finds them by name.
        store: Of artifacts.

    Raises:
        UserError: The file of keys has faults, or a package for Python is missing.
        ServerError: The address cannot be bound.
    """
    values = context.params
    _require_packages(recipes, store, values["traces"])
    from pipeline.gateway.server import bound_sockets
    from pipeline.gateway.tenants import Tenants
    from pipeline.serving.gateway_process import GatewayLaunch

    tenants = Tenants.load(values["keys"]) if values["keys"] else Tenants()
    words = given_words(context, {str(one.name) for one in _gateway_parameters()} - {"port"})
    usual = context.get_parameter_source("port") is ParameterSource.DEFAULT
    port = values["port"]
    if usual and not _can_bind(values["host"], port):
        port = 0
    with bound_sockets(values["host"], port) as sockets:
        for one in sockets:
            words += ["--listen-fd", str(one.fileno())]
        host, port = values["host"], sockets[0].getsockname()[1]
        yield GatewayLaunch(
            command=(
                *(sys.executable, "-m", "pipeline.cli.main", "gateway"),
                *(recipe.name for recipe in recipes),
                *words,
                *("--port", str(port), "--parent", str(os.getpid()), "--store", str(store.root)),
            ),
            sockets=sockets,
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            needs_key=tenants.require_keys,
            drain_s=values["drain_s"],
        )


def given_words(
    context: click.Context, only: Collection[str] | None = None, *, without: Collection[str] = ()
) -> list[str]:
    """Return the options of a `StartsGateway` command as they were given, for another command line.

    Args:
        context: Of the command.
        only: Names of parameters that are wanted; None for all.
        without: Names of parameters that are not.
    """
    given: dict[str, Any] = context.meta[_GIVEN]
    words: list[str] = []
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name not in given or option.name in without:
            continue
        if only is not None and option.name not in only:
            continue
        value = given[option.name]
        if option.count:
            words += [option.opts[0]] * value
        elif option.is_flag:
            words.append(option.opts[0] if value else option.secondary_opts[0])
        else:
            for one in value if isinstance(value, list) else (value,):
                words += [option.opts[0], one]
    return words


def _gateway_parameters() -> Sequence[click.Parameter]:
    """The options of `gateway_options`, as click has them."""

    @gateway_options
    def bearer() -> None: ...

    parameters: list[click.Parameter] = bearer.__click_params__  # type: ignore[attr-defined]
    return parameters


def _can_bind(host: str, port: int) -> bool:
    from pipeline.errors import ServerError
    from pipeline.gateway.server import bound_sockets

    try:
        with bound_sockets(host, port) as sockets:
            for one in sockets:
                one.listen()
    except (OSError, ServerError):
        return False
    return True


@contextmanager
def _inherited(descriptors: Sequence[int]) -> Iterator[list[socket]]:
    """The listening sockets that a supervisor handed down."""
    from socket import socket

    yield [socket(fileno=descriptor) for descriptor in descriptors]


def _known_recipes(
    names: Sequence[str], overrides: Sequence[str], store: Store, *, wait_s: float
) -> list[Recipe]:
    """Recipes of names, but for those of deployments that are yet to come."""
    from pipeline.cli.named import find_deployment
    from pipeline.errors import InvalidInput
    from pipeline.triton.running import SUPERVISED

    found = []
    for name in names:
        try:
            found.append(find_deployment(name, overrides, store, states=SUPERVISED).recipe)
        except InvalidInput:
            if not wait_s:
                raise
    return found


def _require_packages(recipes: Sequence[Recipe], store: Store, traces: str | None) -> None:
    """Raise UserError with all packages for Python that a gateway needs and that are missing."""
    from pipeline.gateway.traces import ENDPOINT_VARIABLES
    from pipeline.machine.packages import Need, require
    from pipeline.stages.response_cache import needs_of_cache

    needs = [Need("gateway", "the gateway")]
    needs += [Need("traces", "traces")] if traces or any(map(os.environ.get, ENDPOINT_VARIABLES)) else []
    needs += [need for recipe in recipes for need in needs_of_cache(recipe, store)]
    require("the gateway", needs)


def _prompt_log(which: str) -> PromptLog | None:
    from pipeline.gateway.prompt_log import PromptLog

    if which == "no":
        return None
    if which == "full":
        return PromptLog(None)
    from pipeline.cache.redaction import Redaction
    from pipeline.extras import missing

    try:
        return PromptLog(Redaction())
    except ImportError as error:
        raise missing("--log-prompts redacted", error, "cache") from error


def _metric_names(text: str) -> tuple[MetricNames, ...]:
    names = tuple(dict.fromkeys(filter(None, text.replace(" ", "").split(","))))
    unknown = [name for name in names if name not in ("vllm", "gen_ai")]
    if unknown:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are vllm and gen_ai", param_hint="--metric-names"
        )
    return cast("tuple[MetricNames, ...]", names)


def _endpoint(text: str) -> tuple[str, str]:
    name, mark, url = text.rpartition("=")
    if ":" not in url or (mark and not name):
        raise click.BadParameter(f"{text}: is not NAME=HOST:PORT", param_hint="--endpoint")
    return name, url


def _origin(text: str) -> str:
    """An origin as browsers send it."""
    scheme, mark, rest = text.lower().rstrip("/").partition("://")
    if text in ("*", "null"):
        return text
    if not (scheme and mark and rest) or "/" in rest:
        raise click.BadParameter(
            f"{text}: is not SCHEME://HOST or SCHEME://HOST:PORT", param_hint="--allowed-origin"
        )
    return f"{scheme}://{rest}"


def _host(text: str) -> str:
    """A host without its port: that of requests does not matter."""
    name, colon, port = text.rpartition(":")
    host = name if colon and port.isdecimal() else text
    if not host or "/" in host:
        raise click.BadParameter(f"{text}: is not a host", param_hint="--allowed-host")
    return host


def _advice(hosts: tuple[str, ...], *, keys: bool) -> str:
    """Options that a gateway which other machines reach should be started with, and is not."""
    lines = []
    if not hosts:
        lines.append("--allowed-host NAME: requests may name it by its IP addresses only")
    if not keys:
        lines.append("--keys FILE: whoever reaches it may ask")
    return "\n  ".join(["other machines reach this gateway; it was started without", *lines]) if lines else ""
