"""`pipeline compare`: is B slower than A, and does it answer worse?"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from pipeline.cli.load import checked, file_option, load_faults, load_options, number, options_of
from pipeline.cli.options import complete_running, gpus_option, json_option, store_option
from pipeline.cli.output import is_quiet, note, print_json, print_rich, reporter
from pipeline.cli.subject import find_subject, read_slo
from pipeline.errors import Fault, InvalidInput
from pipeline.extras import missing

if TYPE_CHECKING:
    from pipeline.bench.compare import CompareOptions, CompareResult
    from pipeline.bench.sides import DeploymentSource
    from pipeline.golden import GoldenSet

Kind = Literal["file", "package", "deployment"]

_OVER_BUDGET, _INTERRUPTED = 3, 130
_WIDTH = 130
# What may be said of two stored runs; all other options say how something is measured or asked.
_OF_FILES = {"a", "b", "threshold", "max_regression", "as_json", "output", "page", "dry_run"}


def _share(name: str, help_: str, *, above: bool = False) -> Callable[[Any], Any]:
    return click.option(name, callback=checked(number(0, 1, above=above)), metavar="SHARE", help=help_)


@click.command(name="compare")
@click.argument("a", shell_complete=complete_running)
@click.argument("b", shell_complete=complete_running)
@click.option(
    "--rounds",
    callback=checked(number(0, 400, whole=True)),
    default="6",
    show_default=True,
    metavar="N",
    help="Loads on A and B each, in turns: A B B A. With 0 only answers are compared.",
)
@click.option(
    "--threshold",
    callback=checked(number(0, 1, above=True)),
    default="0.05",
    show_default=True,
    metavar="SHARE",
    help="Difference of speed that you want to see: where the rounds cannot show it, the number that can is told.",
)
@click.option(
    "--questions",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Golden questions, as JSON lines; by default those that the package of B carries, or else that of A.",
)
@click.option("--skip-golden", is_flag=True, help="Ask no golden questions.")
@click.option("--judge", metavar="URL", help="Have a model judge the answers: any server of OpenAI's API.")
@click.option("--judge-model", metavar="NAME", help="Of the judge.")
@click.option(
    "--judge-key-env",
    default="JUDGE_API_KEY",
    show_default=True,
    metavar="NAME",
    help="Environment variable that holds the API key of the judge.",
)
@_share("--max-regression", "Budget: how much worse a figure of speed may be than that of A, noise left out.")
@_share("--min-passed", "Budget: share of the questions that B must answer right.", above=True)
@_share("--min-equal", "Budget: share of the questions that B must answer as A does, word for word.")
@_share("--min-similar", "Budget: share of the questions whose answers must be similar.")
@click.option(
    "--max-perplexity-increase",
    callback=checked(number(0)),
    metavar="SHARE",
    help="Budget: how much more perplexed B may be by the answers of A than A is.",
)
@_share("--max-lost", "Budget: share of the questions where the judge may prefer A.")
@click.option(
    "--by-turns", is_flag=True, help="Start packages anew for each part of the rounds, though two fit."
)
@click.option(
    "--way",
    type=click.Choice(("gateway", "triton")),
    default="triton",
    show_default=True,
    help="Load the gateways, or Triton itself. A gateway's response cache is then part of the figures.",
)
@click.option(
    "--api-key",
    envvar="PIPELINE_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="Of the gateways. In the environment it is not seen by others on this machine.",
)
@click.option(
    "--slo",
    multiple=True,
    metavar="KEY=MS",
    help="A target for goodput, such as ttft_p95_ms=500, instead of the recipe's. May be repeated.",
)
@gpus_option
@store_option
@load_options
@json_option
@file_option("--output", "json", "Write the result as JSON.")
@file_option(
    "--page", "html", "Write the result as one HTML page, with the answers that differ side by side."
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; start and send nothing.")
@click.pass_context
def command(context: click.Context, /, a: str, b: str, **given: Any) -> None:
    """Compare B with A: two results of `pipeline bench --output`, two running deployments, or two packages.

    \b
    pipeline compare before.json after.json --max-regression 0.05
    pipeline compare chat-fp8 chat-fp4 --concurrency 8 --rounds 10 --page difference.html
    pipeline compare /srv/package-1 /srv/package-2 --min-similar 0.9 --max-perplexity-increase 0.02
    pipeline compare chat-fp8 chat-fp4 --rounds 0 --questions mine.jsonl --judge https://api.example.com --judge-model x

    Both get the same load with the same seeds, in turns. A figure is called better or worse only if that is not noise:
    a package that is compared with itself is called worse in less than one comparison of twenty, whatever figure it
    would be. Golden questions go to Triton itself, greedily. Packages are served for as long as the comparison takes.

    Budgets that are not given are those of the golden questions. Ctrl-C ends it with what three rounds or more have
    shown. The exit code is 0; 3 where a figure is over a budget; 2 where the options are wrong, or two stored runs did
    not ask the same; 130 after Ctrl-C.
    """
    kinds = [_kind(word) for word in (a, b)]
    faults = _faults(context, (a, b), kinds, given)
    if faults:
        raise InvalidInput("pipeline compare", faults)
    try:
        from pipeline.bench.compare import compare_deployments, compare_files
        from pipeline.cli.render.compare import compare_lines
    except ImportError as error:
        raise missing("comparing", error, "bench") from error
    if kinds == ["file", "file"]:
        result = compare_files(Path(a), Path(b), given["threshold"], given["max_regression"])
    else:
        first, second = (_source(word, kind, given) for word, kind in zip((a, b), kinds, strict=True))
        options = _options(given, first, second)
        if given["dry_run"]:
            _show(first, second, options, as_json=given["as_json"])
            return
        result = compare_deployments(first, second, options, reporter(silent=is_quiet() or given["as_json"]))
    _write(result, given)
    if given["as_json"]:
        click.echo(result.model_dump_json(by_alias=True, indent=2))
    else:
        print_rich(*compare_lines(result), width=_WIDTH)
    if result.interrupted:
        raise click.exceptions.Exit(_INTERRUPTED)
    if not result.passed:
        raise click.exceptions.Exit(_OVER_BUDGET)


def _kind(word: str) -> Kind:
    path = Path(word)
    if path.is_dir():
        return "package"
    return "file" if word.endswith(".json") else "deployment"


def _faults(
    context: click.Context, words: tuple[str, str], kinds: list[Kind], given: dict[str, Any]
) -> list[Fault]:
    """Everything that is wrong with the command line."""
    faults = load_faults(context, given)
    for name, word, kind in zip("AB", words, kinds, strict=True):
        if kind == "file" and not os.path.isfile(word):
            faults.append(Fault("there is no such file", key=name, value=word))
        if kind == "package" and not os.path.isfile(os.path.join(word, "deployment.json")):
            fix = "name the folder that `pipeline build` made"
            faults.append(Fault("has no deployment.json", key=name, value=word, fix=fix))
    if len(set(kinds)) == 2 and "file" in kinds:
        fix = "compare two files, or two of deployments and packages"
        faults.append(Fault("a stored run cannot be compared with what runs", fix=fix))
    if kinds == ["file", "file"]:
        problem = "says how something is measured or asked, and two stored runs have been"
        faults += [
            Fault(problem, key=f"--{one.replace('_', '-')}")
            for one in context.params
            if one not in _OF_FILES and context.get_parameter_source(one) == ParameterSource.COMMANDLINE
        ]
    asks = not given["skip_golden"]
    if given["questions"] and not asks:
        faults.append(Fault("--questions and --skip-golden exclude each other"))
    if bool(given["judge"]) != bool(given["judge_model"]):
        faults.append(Fault("--judge and --judge-model go together"))
    if given["judge"] and not given["judge"].startswith(("http://", "https://")):
        faults.append(Fault("must be http://host:port, or https://…", key="--judge", value=given["judge"]))
    of_answers = ("judge", "min_passed", "min_equal", "min_similar", "max_perplexity_increase", "max_lost")
    if not asks:
        faults += [
            Fault("goes with golden questions", key=f"--{one.replace('_', '-')}")
            for one in of_answers
            if given[one] is not None
        ]
    if given["max_lost"] is not None and not given["judge"]:
        faults.append(Fault("goes with --judge", key="--max-lost"))
    if given["rounds"] == 0 and not asks:
        faults.append(Fault("leaves nothing to compare", key="--rounds", value=0))
    if given["rounds"] == 0 and given["max_regression"] is not None:
        faults.append(Fault("needs rounds", key="--max-regression"))
    if 0 < (given["rounds"] or 3) < 3:
        faults.append(
            Fault("must be 0, or at least 3: fewer show nothing", key="--rounds", value=given["rounds"])
        )
    if (
        given["max_regression"] is not None
        and given["rounds"]
        and "file" not in kinds
        and given["rounds"] < 5
    ):
        faults.append(Fault("needs --rounds 5 or more", key="--max-regression"))
    return faults + read_slo(given["slo"])[1]


def _source(word: str, kind: Kind, given: dict[str, Any]) -> DeploymentSource:
    """Where A, or B, comes from."""
    from pipeline.bench.sides import PackageSource, RunningSource
    from pipeline.recipe import Slo
    from pipeline.serving.deployments import find_deployment
    from pipeline.store import Store

    if kind == "package":
        targets, _ = read_slo(given["slo"])
        return PackageSource(
            word, Path(word), Slo(**targets) if targets else None, given["way"], given["gpus"]
        )
    store = Store.at(given["store"])
    record = find_deployment(word, (), store).require_server(store)
    subject = find_subject(word, {**given, "url": None, "model": None, "tokenizer": None, "wait_s": 0.0})
    return RunningSource(word, subject, record)


def _options(given: dict[str, Any], a: DeploymentSource, b: DeploymentSource) -> CompareOptions:
    from pipeline.bench.compare import CompareOptions
    from pipeline.bench.judge import Judge

    golden = None if given["skip_golden"] else _golden(given, a, b)
    judge = None
    if given["judge"]:
        judge = Judge(given["judge"], given["judge_model"], os.environ.get(given["judge_key_env"], ""))
    return CompareOptions(
        bench=options_of(given),
        rounds=given["rounds"],
        golden=golden,
        judge=judge,
        threshold=given["threshold"],
        max_regression=given["max_regression"],
        max_lost=given["max_lost"],
        by_turns=given["by_turns"],
    )


def _golden(given: dict[str, Any], a: DeploymentSource, b: DeploymentSource) -> GoldenSet | None:
    """The questions, with the budgets of the command line in place of their own."""
    from pipeline.golden import GoldenBudgets, GoldenSet

    if given["questions"]:
        golden: GoldenSet | None = GoldenSet.read(given["questions"])
    else:
        golden = GoldenSet.load(b.package) or GoldenSet.load(a.package)
    budgets = {name: given[name] for name in GoldenBudgets.model_fields if given[name] is not None}
    if golden is None:
        asked = [f"--{name.replace('_', '-')}" for name in (*budgets, *(["judge"] if given["judge"] else []))]
        if asked or not given["rounds"]:
            fix = "neither package carries any: give --questions FILE"
            raise InvalidInput(
                "pipeline compare", [Fault("needs golden questions", key=", ".join(asked), fix=fix)]
            )
        return None
    return GoldenSet(golden.questions, golden.budgets.model_copy(update=budgets))


def _show(a: DeploymentSource, b: DeploymentSource, options: CompareOptions, *, as_json: bool) -> None:
    seconds = options.bench.seconds
    each = None if seconds is None else seconds + options.bench.warm_up_s
    parts = 2 * options.rounds * len(options.bench.loads)
    shown = {
        "a": f"{a.given}, from {a.package}",
        "b": f"{b.given}, from {b.package}",
        "rounds": f"{options.rounds} of each, in turns: A B B A",
        "loads": ", then ".join(map(str, options.bench.loads)),
        "questions": len(options.golden.questions) if options.golden else 0,
        "judge": options.judge.model if options.judge else "none",
        "takes": "as long as the requests take" if each is None else f"{parts * each:.0f} s of load",
    }
    if as_json:
        print_json(shown)
    else:
        click.echo("\n".join(f"{key:<10}{value}" for key, value in shown.items()))


def _write(result: CompareResult, given: dict[str, Any]) -> None:
    if given["output"]:
        result.write(given["output"])
    if given["page"]:
        from pipeline.bench.compare_page import write_compare_page

        write_compare_page(result, given["page"])
    for path in (given["output"], given["page"]):
        if path:
            note(f"written: {path}")
