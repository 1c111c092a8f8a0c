"""Arguments and options that several verbs share, and those that all have.

The common options may stand before or behind a command: `pipeline -q build tiny-cpu`, `pipeline build tiny-cpu -q`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from pipeline.cli.output import QUIET, VERBOSE
from pipeline.errors import UserError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from pipeline.store import Store

Command = TypeVar("Command", bound=Callable[..., Any])
_STORE = "pipeline.store"  # key of click's `Context.meta`


def _set_quiet(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[QUIET] = True


def _set_verbose(context: click.Context, _parameter: click.Parameter, count: int) -> None:
    if count:
        import logging

        context.meta[VERBOSE] = True
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("pipeline").setLevel(logging.INFO if count == 1 else logging.DEBUG)


def _set_color(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        os.environ["NO_COLOR"] = "1"  # for rich, and for programs that are started
    if os.environ.get("NO_COLOR"):
        context.find_root().color = context.color = False


def _set_store(context: click.Context, _parameter: click.Parameter, root: Path | None) -> None:
    if root is not None:
        context.meta[_STORE] = root


def common_options() -> list[click.Option]:
    """Make the options that every command has; their callbacks act, so that no command gets them as arguments."""
    return [
        click.Option(
            ["--store"], type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", expose_value=False,
            callback=_set_store,
            help="Where artifacts lie; by default $PIPELINE_STORE, or ~/.cache/pipeline/store.",
        ),
        click.Option(
            ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_set_quiet,
            help="Print results and errors only.",
        ),
        click.Option(
            ["-v", "--verbose"], count=True, expose_value=False, callback=_set_verbose,
            help="Print whole paths and what the parts log; -vv prints details, too.",
        ),
        click.Option(
            ["--no-color"], is_flag=True, expose_value=False, callback=_set_color,
            help="Print without colours, as $NO_COLOR does.",
        ),
        click.Option(["--debug"], is_flag=True, expose_value=False, help="Show a traceback when something fails."),
    ]  # fmt: skip


# Options that many commands have, by the section of the help in which they stand.
_SECTIONS = {
    "Recipe and build": (
        "overrides",
        "allowed",
        "package",
        "build",
        "until",
        "devices",
        "executor",
        "executor_timeout_s",
    ),
    "Output": ("as_json", "output", "force", "dry_run"),
}
_COMMON = ("store", "quiet", "verbose", "no_color", "debug")


class Verb(click.Command):
    """A command that has the common options besides its own; its help lists options in sections."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params += common_options()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of a group, its own options, and those of all commands at the end."""
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        titles = ("Recipe and build", "Options", "Output", "Options of all commands")
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in titles}
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        for option in options:
            if (record := option.get_help_record(ctx)) is not None:
                sections[_section(option, ctx)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class VerbGroup(Verb, click.Group):
    """Commands below one name. They and the group have the common options."""

    command_class = Verb

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each command, not cut off."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, found.get_short_help_str(limit=200))
            for name, found in commands.items()
            if found is not None
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _section(option: click.Option, ctx: click.Context) -> str:
    if option.name in _COMMON or set(option.opts) & set(ctx.help_option_names):
        return "Options of all commands"
    return next((title for title, names in _SECTIONS.items() if option.name in names), "Options")


def store_root() -> Path | None:
    """Root of the store that `--store` names; None without it."""
    context = click.get_current_context(silent=True)
    root: Path | None = None if context is None else context.meta.get(_STORE)
    return root


def open_store() -> Store:
    """Open the store that `--store` names, or the default one."""
    from pipeline.store import Store

    return Store.at(store_root())


set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE",
    help="Replace a value of the recipe, such as limits.max_concurrency=4. May be repeated.",
)  # fmt: skip

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")

output_option = click.option(
    "--output", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE", default="-",
    help="By default standard output. A new file can be read by its owner alone (mode 0600).",
)  # fmt: skip


@contextmanager
def opened(output: str) -> Iterator[TextIO]:
    """The file of `output_option`, empty, to write questions or answers to.

    Raises:
        UserError: it cannot be opened.
    """
    if output == "-":
        yield sys.stdout
        return
    with ExitStack() as stack:
        from pipeline.private_files import make_private

        try:
            make_private(Path(output), own=False)
            file = stack.enter_context(Path(output).open("w", encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written: {error.strerror}") from error
        yield file


def is_http(url: str) -> bool:
    """Whether the value of --url is the address of an OpenAI API rather than that of Triton's gRPC."""
    return url.startswith(("http://", "https://"))


def complete_recipe(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a packaged recipe, or the path of a file, in a shell."""
    from click.shell_completion import CompletionItem

    from pipeline.resources import folder

    names = sorted(path.stem for path in folder("recipes").glob("*.yaml"))
    return [
        *(CompletionItem(name) for name in names if name.startswith(incomplete)),
        CompletionItem(incomplete, type="file"),
    ]


def complete_running(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a deployment that is announced in the store."""
    from click.shell_completion import CompletionItem

    from pipeline.serving.deployments import announced_names
    from pipeline.store import Store

    names = announced_names(Store.at(context.meta.get(_STORE)))
    return [CompletionItem(name, help="running") for name in names if name.startswith(incomplete)]


def complete_deployment(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete what a deployment is asked by: names of running deployments first, then recipes."""
    running = complete_running(context, parameter, incomplete)
    names = {item.value for item in running}
    recipes = complete_recipe(context, parameter, incomplete)
    return [*running, *(item for item in recipes if item.type == "file" or item.value not in names)]


def recipe_argument(command: Command) -> Command:
    """RECIPE (a file, or the name of a packaged recipe) and --set, for `load_recipe(recipe, overrides)`."""
    return click.argument("recipe", metavar="RECIPE", shell_complete=complete_recipe)(set_option(command))
