"""Trials that another machine measures: a script with every step of them, and its figures back into the study.

The script builds, serves, measures and stops each trial with the commands that a person would type. What it leaves,
one file of `pipeline bench` a trial, is taken in by `take_results`; then the next script has the rounds at the end.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.bench.result import BenchResult
from pipeline.bench.run import BenchOptions
from pipeline.documents import dump_yaml
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.recipe import Recipe
from pipeline.tuning.search import Runner, SearchOptions, plan_trials, take_figures, trial_name
from pipeline.tuning.search_space import SearchSpace, Settings
from pipeline.tuning.study import TuneStudy
from pipeline.tuning.tune import final_rounds

_SLO_MISSED = 3  # exit code of `pipeline bench`, whose figures count all the same


@dataclass(frozen=True, slots=True)
class HandedOverTrials:
    """A script, and what it will measure.

    Attributes:
        script: To be carried to the other machine.
        names: Of the files that it leaves, without .json.
        results: Folder that it makes where it runs.
    """

    script: Path
    names: tuple[str, ...]
    results: str


def hand_over(
    study: TuneStudy, runner: Runner, recipe: Recipe, options: SearchOptions, bench: BenchOptions, pairs: int
) -> HandedOverTrials | None:
    """Write the script of all trials that are to be measured, or of the rounds at the end once they are.

    Args:
        study: That the trials are of.
        runner: Judges them; it serves nothing.
        recipe: As it is.
        options: How many trials, with which loads.
        bench: How they are measured.
        pairs: Of rounds at the end.

    Returns:
        The script; None when nothing is left to measure.
    """
    planned: list[tuple[str, Settings]] = [
        (trial_name(one.number), one.settings) for one in plan_trials(study, runner, options)
    ]
    if not planned:
        planned = [
            (one.name, one.settings)
            for one in final_rounds(study, options, pairs)
            if study.measurement(one.name) is None
        ]
    if not planned:
        return None
    results = f"{recipe.name}-tune"
    script = study.folder / "trials.sh"
    text = "\n".join(_script(recipe, study.space, planned, options, bench, results))
    script.write_text(text + "\n", encoding="utf-8")
    script.chmod(0o755)
    return HandedOverTrials(script, tuple(name for name, _ in planned), results)


def take_results(
    study: TuneStudy, folder: Path, recipe: Recipe, options: SearchOptions, pairs: int
) -> tuple[str, ...]:
    """Take the figures that a script left into the study. Whatever is there already is left as it is.

    Args:
        study: That the script was written for.
        folder: That the script made.
        recipe: As it is.
        options: Of the search.
        pairs: Of rounds at the end.

    Returns:
        Names of what was taken.

    Raises:
        UserError: Nothing in the folder was waited for.
        InvalidInput: With every file that is not what was waited for; nothing is taken then.
    """
    trials = {trial_name(one.number): one for one in study.planned()}
    names = [*trials, *(one.name for one in final_rounds(study, options, pairs))]
    faults: list[Fault] = []
    found: dict[str, BenchResult] = {}
    for name in names:
        file = folder / f"{name}.json"
        if not file.is_file() or study.measurement(name) is not None:
            continue
        try:
            found[name] = BenchResult.read(file)
        except UserError as error:
            faults.append(Fault(str(error)))
            continue
        faults += _strange(found[name], file, recipe, options)
    if faults:
        raise InvalidInput(str(folder), faults)
    failed = {name: folder / f"{name}.failed" for name in trials if (folder / f"{name}.failed").is_file()}
    if not found and not failed:
        waited = ", ".join(f"{name}.json" for name in names[:4]) or "none: all trials have their figures"
        raise UserError(f"{folder} has no figures that this search waits for ({waited})")
    for name, result in found.items():
        study.keep(name, result)
        if name in trials:
            take_figures(study, trials[name], result)
    for name, file in failed.items():
        if name not in found:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            reason = lines[-1] if lines else "it did not serve"
            study.finish(trials[name].number, "failed", reason=reason)
    return (*found, *(name for name in failed if name not in found))


def _strange(result: BenchResult, file: Path, recipe: Recipe, options: SearchOptions) -> Iterator[Fault]:
    if result.name != recipe.name:
        yield Fault(f"is of {result.name}, not of {recipe.name}", key=file.name)
    wanted = {str(load) for load in options.loads}
    strange = [str(one.load) for one in result.levels if str(one.load) not in wanted]
    if strange or not result.levels:
        had = ", ".join(strange) or "no load"
        yield Fault(f"was measured with {had}, and the search has {', '.join(sorted(wanted))}", key=file.name)


def _script(
    recipe: Recipe,
    space: SearchSpace,
    planned: Sequence[tuple[str, Settings]],
    options: SearchOptions,
    bench: BenchOptions,
    results: str,
) -> Iterator[str]:
    name = shlex.quote(recipe.name)
    yield "#!/bin/sh"
    yield f"# Trials of {recipe.name} for `pipeline tune`: each is built, served, measured and stopped."
    yield "# Run it where the recipe can be served, with `pipeline` on PATH. It can be run again: what has figures is"
    yield f"# left as it is. Bring the folder {results} back: pipeline tune … --adopt {results}"
    yield "set -u"
    yield f"results=${{RESULTS:-{shlex.quote(results)}}}"
    yield 'mkdir -p "$results"'
    yield "recipe=$results/recipe.yaml"
    yield "cat > \"$recipe\" <<'END_OF_RECIPE'"
    yield dump_yaml(recipe.model_dump(mode="json", exclude={"cache"})).rstrip()
    yield "END_OF_RECIPE"
    yield textwrap.dedent(
        f"""
        trial() {{
            file=$results/$1.json
            failed=$results/$1.failed
            shift
            if [ -s "$file" ]; then return; fi
            rm -f "$failed"
            if ! pipeline serve "$recipe" "$@" --build --no-gateway --detach >"$failed" 2>&1; then
                echo "$file: does not serve; see $failed" >&2
                pipeline stop {name} >/dev/null 2>&1
                return
            fi
            pipeline bench {name} --way triton {shlex.join(bench_words(bench, options))} --output "$file.part"
            code=$?
            pipeline stop {name}
            if [ $code -eq 0 ] || [ $code -eq {_SLO_MISSED} ]; then
                mv "$file.part" "$file"
                rm -f "$failed"
            fi
        }}
        """
    )
    for one, settings in planned:
        sets = [word for change in space.overrides(settings) for word in ("--set", change)]
        yield shlex.join(["trial", one, *sets])


def bench_words(bench: BenchOptions, options: SearchOptions) -> Iterator[str]:
    """Write how a trial is measured as options of `pipeline bench`."""
    kind = options.loads[0].kind
    if kind == "trace":
        yield from ("--trace", str(bench.file), "--speed", f"{options.loads[0].value:g}")
    else:
        yield from (f"--{kind}", ",".join(f"{load.value:g}" for load in options.loads))
        if bench.file is not None:
            yield from ("--prompts", str(bench.file))
    given = {
        "--prompt-tokens": bench.prompts,
        "--output-tokens": bench.answers,
        "--prefix-tokens": bench.shape.prefix_tokens,
        "--prefixes": bench.shape.prefixes if bench.shape.prefix_tokens else None,
        "--turns": bench.shape.turns if bench.shape.turns > 1 else None,
        "--cancel": bench.shape.cancelled,
        "--think-s": bench.think_s,
        "--temperature": bench.temperature,
        "--duration": bench.seconds,
        "--requests": bench.requests,
        "--timeout": bench.timeout_s,
        "--seed": bench.seed,
    }
    for option, value in given.items():
        if value:
            yield from (option, f"{value:g}" if isinstance(value, float) else str(value))
    yield from ("--warmup", f"{bench.warm_up_s:g}")
    if not bench.chat:
        yield "--raw"
