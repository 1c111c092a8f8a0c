"""What `bench`, `compare` and `tune` measure, from a command line: a deployment that runs here, or any address."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.cli.options import api_key_option, is_http, store_option
from pipeline.errors import Fault

if TYPE_CHECKING:
    from pipeline.bench.subject import Subject

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--url", metavar="URL",
        help="Ask this address instead of a deployment of this machine: http://host:port of an OpenAI API, or "
        "host:port of Triton's gRPC.",
    ),
    click.option(
        "--model", metavar="NAME", help="With --url: the model to ask; of Triton by default tensorrt_llm_bls."
    ),
    click.option(
        "--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
        help="With --url: the model's tokenizer.json and chat template, for prompts of a length and chats of Triton.",
    ),
    click.option(
        "--way", type=click.Choice(("gateway", "triton")),
        help="Through the deployment's gateway, or straight to Triton; by default through its gateway, if it has one.",
    ),
    api_key_option,
    click.option(
        "--slo", "slo", multiple=True, metavar="KEY=MS",
        help="A target, such as ttft_p95_ms=500, instead of the recipe's. May be repeated.",
    ),
    click.option("--wait-s", type=float, default=0.0, metavar="S", help="Wait so long for the deployment to be ready."),
    store_option,
)  # fmt: skip

_ENTRY = "tensorrt_llm_bls"
_GRPC = re.compile(r"[^/\s]+:\d+")
_LONGEST_PROMPT = 1 << 20
_LONGEST_ANSWER, _USUAL_ANSWER = 1 << 16, 256


def subject_options(command: Command) -> Command:
    """Add the options that say what is measured to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def subject_faults(name: str | None, options: dict[str, Any]) -> list[Fault]:
    """Everything that is wrong with the options of `subject_options`.

    Args:
        name: Of a deployment; None with --url.
        options: As click gives them.
    """
    faults = []
    url = options["url"]
    if (name is None) == (url is None):
        faults.append(Fault("name a running deployment, or an address with --url: one of both"))
    if url is None:
        faults += [
            Fault("goes with --url only", key=f"--{one}") for one in ("model", "tokenizer") if options[one]
        ]
    elif is_http(url):
        faults += (
            [] if options["model"] else [Fault("is needed with the address of an OpenAI API", key="--model")]
        )
    elif not _GRPC.fullmatch(url):
        faults.append(Fault("must be http://host:port, or host:port of gRPC", key="--url", value=url))
    if url is not None and options["way"]:
        faults.append(
            Fault("goes with the name of a deployment: an address says it by its form", key="--way")
        )
    return faults + read_slo(options["slo"])[1]


def find_subject(name: str | None, options: dict[str, Any]) -> Subject:
    """Find what is measured.

    Args:
        name: Of a deployment that runs on this machine; None with --url.
        options: As click gives them, without faults.

    Raises:
        ServerError: The deployment does not run.
        InvalidInput: There is no such deployment or recipe.
        UserError: It has no gateway, and one was asked for.
    """
    from pipeline.bench.subject import Subject
    from pipeline.recipe import Slo
    from pipeline.serving.deployments import find_deployment
    from pipeline.store import Store

    targets, _ = read_slo(options["slo"])
    headers = {"Authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    if name is None:
        url, http = options["url"], is_http(options["url"])
        return Subject(
            name=url,
            way="gateway" if http else "triton",
            url=url,
            model=options["model"] or _ENTRY,
            tokenizer=options["tokenizer"],
            max_prompt=_LONGEST_PROMPT,
            max_answer=_LONGEST_ANSWER,
            default_answer=_USUAL_ANSWER,
            slo=Slo(**targets) if targets else None,
            gateway_url=url.rstrip("/").removesuffix("/v1") if http else None,
            headers=headers,
        )
    store = Store.at(options["store"])
    found = find_deployment(name, (), store, wait_s=options["wait_s"])
    slo = {**(found.recipe.slo.model_dump(exclude_none=True) if found.recipe.slo else {}), **targets}
    calibration = found.recipe.quantization.calibration
    return replace(
        Subject.of_record(found.require_server(store), Slo(**slo) if slo else None, options["way"]),
        dataset=None if calibration is None else calibration.dataset,
        headers=headers,
        recipe=found.recipe,
        store=store,
    )


def read_slo(given: tuple[str, ...]) -> tuple[dict[str, float], list[Fault]]:
    """Read the targets of --slo: by their names, and what is wrong with them."""
    from pipeline.recipe import Slo

    targets, faults = dict[str, float](), list[Fault]()
    for one in given:
        key, _, value = one.partition("=")
        try:
            targets[key] = float(value)
        except ValueError:
            targets[key] = 0.0
        if key not in Slo.model_fields or not 0 < targets[key] < float("inf"):
            wanted = " or ".join(Slo.model_fields)
            faults.append(Fault(f"must be {wanted}, =, and milliseconds", key="--slo", value=one))
    return targets, faults
