"""Options of `pipeline plan` about speed and cost, and `--compare`: deployments side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.cli.output import note
from pipeline.errors import Fault, InvalidInput

Command = TypeVar("Command", bound=Callable[..., Any])
_ROWS = 15  # options that are printed
_NAMES = ("compare", "devices", "prices", "prompt_tokens", "output_tokens", "acceptance", "output")
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
        "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="With --compare: draw the front as .html or .png.",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Speed:
    """What was asked about speed and cost, as words."""

    compare: bool
    devices: str | None
    prices: tuple[str, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    acceptance: float | None
    output: Path | None

    def asked(self) -> Any:
        """Read the options, with every fault at once (`plan.performance.workload`)."""
        from pipeline.plan.performance.workload import read_workload_options

        misplaced = {"--gpus": self.devices, "--output": self.output}
        faults = [
            Fault("goes with --compare", key=name, value=str(value))
            for name, value in misplaced.items()
            if value is not None and not self.compare
        ]
        if self.output is not None and self.output.suffix not in (".html", ".png"):
            faults.append(Fault("must end in .html or .png", key="--output", value=str(self.output)))
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


def speed_options(command: Command) -> Command:
    """Adds the options, and passes them on as one `speed: Speed`."""

    @functools.wraps(command)
    def joined(*arguments: Any, **given: Any) -> Any:
        speed = Speed(**{name: given.pop(name) for name in _NAMES})
        return command(*arguments, **given, speed=speed)

    for option in reversed(_OPTIONS):
        joined = option(joined)
    return joined  # type: ignore[return-value]


def compare_page(recipe: Any, store: Any, speed: Speed, *, offline: bool, as_json: bool, width: int) -> str:
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
