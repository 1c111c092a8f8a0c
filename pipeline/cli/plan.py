"""`pipeline plan`: know before you build; with --compare, deployments side by side."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.cli.options import allow_option, complete_recipe, set_option, store_option
from pipeline.cli.output import note
from pipeline.errors import Fault, InvalidInput, UserError

Command = TypeVar("Command", bound=Callable[..., Any])
_ROWS = 15  # options that are printed
_NAMES = (
    "compare", "devices", "prices", "prompt_tokens", "output_tokens", "acceptance", "output", "calibrate_from",
    "more_files", "calibration", "no_calibration",
)  # fmt: skip
_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--compare", is_flag=True, help="Rank GPUs, splits, formats and drafts for the recipe's SLO."),
    click.option(
        "--gpus", "devices", metavar="NAME,…",
        help="GPUs to compare; a beginning of a name is all of them (h100). By default those with a price, or all.",
    ),
    click.option(
        "--price", "prices", multiple=True, metavar="GPU=PER_HOUR",
        help="Price of an hour of one GPU, in any currency. May be repeated.",
    ),
    click.option("--prompt-tokens", type=int, metavar="N", help="Length of prompts; by default the recipe's longest."),
    click.option("--output-tokens", type=int, metavar="N", help="Length of answers; by default the recipe's longest."),
    click.option(
        "--acceptance", type=float, metavar="SHARE", help="Share of the draft's tokens that the target accepts, 0 to 1."
    ),
    click.option(
        "--output", type=_FILE, metavar="FILE",
        help="With --compare: draw the front as .html or .png. With --calibrate-from: write the constants there, as "
        ".yaml, instead of into the store.",
    ),
    click.option(
        "--calibrate-from", multiple=True, type=_FILE, metavar="BENCH.json",
        help="Fit the constants of the recipe's GPU and runtime, or of this machine's processor, to what `pipeline "
        "bench --output` measured, and keep them. Further files may follow.",
    ),
    click.option(
        "--calibration", type=_FILE, metavar="FILE", help="Forecast with these constants instead of the store's."
    ),
    click.option(
        "--no-calibration", is_flag=True, help="Forecast with constants of published figures, whatever the store has."
    ),
    click.argument("more_files", nargs=-1, type=_FILE, metavar="[BENCH.json]…"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """Values of the options about speed and cost, as they were given."""

    compare: bool
    devices: str | None
    prices: tuple[str, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    acceptance: float | None
    output: Path | None
    calibrate_from: tuple[Path, ...]
    more_files: tuple[Path, ...]
    calibration: Path | None
    no_calibration: bool

    @property
    def bench_files(self) -> tuple[Path, ...]:
        """Results to calibrate from, each once."""
        return tuple(dict.fromkeys((*self.calibrate_from, *self.more_files)))

    def asked(self) -> Any:
        """Read the options, with every fault at once (`plan.performance.workload`)."""
        from pipeline.plan.performance.workload import read_workload_options

        fits = bool(self.calibrate_from)
        faults = list(self._misplaced(fits))
        endings = (".yaml",) if fits else (".html", ".png")
        if self.output is not None and self.output.suffix not in endings:
            faults.append(
                Fault(f"must end in {' or '.join(endings)}", key="--output", value=str(self.output))
            )
        try:
            asked = read_workload_options(
                devices=self.devices,
                prices=self.prices,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                acceptance=self.acceptance,
            )
        except InvalidInput as error:
            raise InvalidInput("command line", (*faults, *error.faults)) from None
        if faults:
            raise InvalidInput("command line", faults)
        return asked

    def _misplaced(self, fits: bool) -> Iterator[Fault]:
        """Options that go with others, or exclude them."""
        if self.devices is not None and not self.compare:
            yield Fault("goes with --compare", key="--gpus", value=self.devices)
        if self.output is not None and not self.compare and not fits:
            yield Fault("goes with --compare or --calibrate-from", key="--output", value=str(self.output))
        if self.more_files and not fits:
            yield Fault("is one word too many: name one RECIPE", value=" ".join(map(str, self.more_files)))
        if fits and self.compare:
            yield Fault("--calibrate-from and --compare exclude each other")
        if self.calibration is not None and (fits or self.compare or self.no_calibration):
            named = ("--calibrate-from", fits), ("--compare", self.compare), ("--no-calibration", True)
            other = next(name for name, given in named if given)
            yield Fault(f"--calibration and {other} exclude each other")


def speed_options(command: Command) -> Command:
    """Add the options about speed and cost to a command, and pass them on as one `speed: SpeedOptions`."""

    @functools.wraps(command)
    def joined(*arguments: Any, **given: Any) -> Any:
        speed = SpeedOptions(**{name: given.pop(name) for name in _NAMES})
        return command(*arguments, **given, speed=speed)

    for option in reversed(_OPTIONS):
        joined = option(joined)
    return joined  # type: ignore[return-value]


@click.command(name="plan")
@click.argument("recipe", metavar="RECIPE", required=False, shell_complete=complete_recipe)
@set_option
@click.option("--gpu", metavar="NAME", help="As --set runtime.gpu=NAME, before all others: try another GPU.")
@store_option
@click.option("--until", default="package", show_default=True, metavar="STEP", help="Plan up to this step.")
@allow_option
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: every figure with its formula and its sources."
)
@click.option(
    "--accuracy",
    is_flag=True,
    help="Compare the models of memory and speed with published measurements; needs no RECIPE.",
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of what --json prints; needs no RECIPE.")
@speed_options
def command(
    recipe: str | None,
    overrides: tuple[str, ...],
    gpu: str | None,
    store: Path | None,
    until: str,
    allowed: frozenset[str],
    offline: bool,
    as_json: bool,
    accuracy: bool,
    schema: bool,
    speed: SpeedOptions,
) -> None:
    """Say what RECIPE comes to before anything is made: whether it fits into memory, what `pipeline build` would make,
    and what speaks against it. Nothing is downloaded but the config.json and the headers of models that are not known.

    Exit code 2 if it does not fit, or a build would be refused.

    \b
    pipeline plan llama-3.1-8b-fp8
    pipeline plan llama-3.3-70b-fp8 --gpu h200-sxm-141g --set runtime.tensor_parallel=2
    pipeline plan tiny-cpu --json
    pipeline plan llama-3.3-70b-fp8 --prompt-tokens 1000 --output-tokens 500 --acceptance 0.8 --price h100-sxm=2.5
    pipeline plan llama-3.3-70b-fp8 --compare --price h100-sxm=2.5 --price h200=3.5 --output front.html
    pipeline plan llama-3.3-70b-fp8 --calibrate-from bench-1.json bench-2.json
    pipeline plan --accuracy
    """
    from pipeline.cli.render.accuracy import accuracy_page
    from pipeline.cli.render.bars import Look
    from pipeline.cli.render.comparison_json import schema_text as comparison_schema
    from pipeline.cli.render.plan import document, page
    from pipeline.prepare.report import make_report, stored_calibration
    from pipeline.prepare.report_json import schema_text
    from pipeline.serving.deployments import recipe_of
    from pipeline.store import Store

    if schema:
        click.echo(comparison_schema() if speed.compare else schema_text().rstrip("\n"))
        return
    if accuracy:
        click.echo(accuracy_page(as_json=as_json))
        return
    if recipe is None:
        raise UserError("name a RECIPE (pipeline recipes ls), or give --accuracy or --schema")
    if gpu is not None:
        overrides = (f"runtime.gpu={gpu}", *overrides)
    shelf, asked, look = Store.at(store), speed.asked(), Look.of_output()
    chosen = recipe_of(recipe, overrides, shelf)
    if speed.compare:
        click.echo(compare_page(chosen, shelf, speed, offline=offline, as_json=as_json, width=look.width))
        return
    if speed.bench_files:
        click.echo(calibrate_page(chosen, shelf, speed, as_json=as_json, width=look.width))
        return
    calibration = None if speed.no_calibration else stored_calibration(chosen, shelf, speed.calibration)
    outlook = make_report(
        chosen, shelf, offline=offline, allowed=allowed, workload=asked, calibration=calibration
    )
    if outlook.plan is not None and until not in outlook.plan:
        raise UserError(f"no step {until!r}; this build has {', '.join(step.name for step in outlook.plan)}")
    click.echo(document(outlook, shelf, until) if as_json else page(outlook, shelf, until, look))
    if outlook.refused:
        sys.exit(UserError.exit_code)


def compare_page(
    recipe: Any, store: Any, speed: SpeedOptions, *, offline: bool, as_json: bool, width: int
) -> str:
    """Write the front to `--output`, and return what `--compare` prints."""
    from pipeline.cli.render.comparison import comparison_lines, front_lines
    from pipeline.cli.render.comparison_json import comparison_text
    from pipeline.cli.render.pareto import front_page, front_png, require_matplotlib
    from pipeline.prepare.report import compare_recipe
    from pipeline.store import human_bytes

    is_png = speed.output is not None and speed.output.suffix == ".png"
    if is_png:
        # Comparing takes a while; what is missing is said before.
        require_matplotlib()
    found = compare_recipe(recipe, store, speed.asked(), offline=offline)
    if speed.output is not None:
        speed.output.write_bytes(front_png(found) if is_png else front_page(found).encode())
        note(f"wrote {speed.output}, {human_bytes(speed.output.stat().st_size)}")
    if as_json:
        return comparison_text(found)
    lines = [*comparison_lines(found, rows=_ROWS), "", *front_lines(found, width)]
    return "\n".join(line.rstrip() for line in lines)


def calibrate_page(recipe: Any, store: Any, speed: SpeedOptions, *, as_json: bool, width: int) -> str:
    """Write fitted constants to `--output` or into the store, and return what `--calibrate-from` prints."""
    from pipeline.bench.forecast import calibrate_recipe
    from pipeline.cli.render.calibration import calibration_json, calibration_lines
    from pipeline.prepare.report import calibration_path

    found = calibrate_recipe(recipe, store, speed.bench_files)
    path = speed.output or calibration_path(recipe, store)
    found.fit.calibration.write(path)
    return calibration_json(found, path) if as_json else "\n".join(calibration_lines(found, path, width))
