"""The options of a gateway, for `gateway` and for `serve`, which starts one: what they are, read, and handed on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from pipeline.cache.redis import RedisAddress
    from pipeline.gateway.metric_names import MetricNames

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
        "--limits-redis",
        metavar="URL",
        envvar="PIPELINE_LIMITS_REDIS",
        show_envvar=True,
        callback=lambda _, __, given: _redis_address(given),
        help="Redis or Valkey server, such as redis://limits:6379/0, of a deployment with several gateways: those with "
        "the same one share the requests and tokens that a tenant may use in a minute, its requests at once, and "
        "stored responses; password: $PIPELINE_CACHE_PASSWORD. While it does not answer, each gateway counts by "
        "itself. Files and batches then need PostgreSQL (the recipe's cache.backend), or --batch-folder.",
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
        type=click.IntRange(min=0),
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
        help="Folder of uploaded files and batches, on a local disk. Gateways that share it share their batches. By "
        "default they are in PostgreSQL, if the recipe's cache.backend names it; refused, with --limits-redis; else in "
        "batches/ of the store.",
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
        help="Responses of /v1/responses that are stored for each tenant, for previous_response_id and "
        "GET /v1/responses/ID; the longest unused are forgotten first. 0 stores none. They are on the server that the "
        "recipe's cache.backend or --limits-redis names, else in memory.",
    ),
    click.option(
        "--stored-responses-mib",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        help="Most MiB of JSON that the stored responses of each tenant take.",
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


def gateway_option_names() -> frozenset[str]:
    """Return the names of the parameters that `gateway_options` adds to a command."""

    @gateway_options
    def bearer() -> None: ...

    parameters: list[click.Parameter] = bearer.__click_params__  # type: ignore[attr-defined]
    return frozenset(str(one.name) for one in parameters)


class StartsGateway(click.Command):
    """A command with `gateway_options` that hands them on: it keeps the words that were given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.meta[_GIVEN] = given
        return super().parse_args(ctx, args)


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


def read_endpoints(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Read the values of `--endpoint`.

    Args:
        given: [NAME=]HOST:PORT, or [NAME=]dns:NAME:PORT.

    Returns:
        Of each the name, empty if there is none, and host:port or dns:NAME:PORT.

    Raises:
        click.BadParameter: Some are something else; it names all of them.
    """
    if not given:
        return ()
    from pipeline.client import Refused
    from pipeline.client.endpoints import parse_target

    found, faults = [], []
    for text in given:
        name, mark, url = text.rpartition("=")
        try:
            if ":" not in url or (mark and not name):
                raise Refused(f"{text}: is not NAME=HOST:PORT")
            found.append((name, parse_target(url)))
        except Refused as error:
            faults.append(str(error))
    if faults:
        raise click.BadParameter("; ".join(faults), param_hint="--endpoint")
    return tuple(found)


def _redis_address(url: str | None) -> RedisAddress | None:
    if not url:
        return None
    from pipeline.cache.redis import RedisAddress

    try:
        return RedisAddress.parse(url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--limits-redis") from None


def _metric_names(text: str) -> tuple[MetricNames, ...]:
    names = tuple(dict.fromkeys(filter(None, text.replace(" ", "").split(","))))
    unknown = [name for name in names if name not in ("vllm", "gen_ai")]
    if unknown:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are vllm and gen_ai", param_hint="--metric-names"
        )
    return cast("tuple[MetricNames, ...]", names)


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
