"""Server that is measured: a deployment of this machine, or any address."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.bench.targets import OpenAITarget, Target, TritonTarget
from pipeline.errors import UserError
from pipeline.recipe import Recipe, Slo
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.serving.deployments import find_deployment
from pipeline.store import Store
from pipeline.triton.deployment import ENTRY, Deployment
from pipeline.triton.running import RunningServer

if TYPE_CHECKING:
    from pipeline.bench.settings import SubjectSettings

Way = Literal["gateway", "triton"]

_LONGEST_PROMPT = 1 << 20
_LONGEST_ANSWER, _USUAL_ANSWER = 1 << 16, 256


@dataclass(frozen=True, slots=True)
class Subject:
    """A server that is measured.

    Attributes:
        way: Through an OpenAI gateway, or straight to Triton.
        url: http://host:port of the gateway, or host:port of Triton's gRPC.
        tokenizer: Folder with tokenizer.json and the chat template; None where it is not known.
        max_prompt: Tokens that a prompt may have, those of the chat template included.
        max_answer: Tokens that an answer may have.
        default_answer: Tokens that an answer may have where nothing says how many; None for `max_answer`.
        triton_metrics: URL of Triton's metrics page; None where it is not known.
        gateway_url: Gateway whose metrics page is read, too; None without one.
        about: Further values of the result's `target`: package digest, runtime, versions.
        headers: Headers of requests to a gateway, such as Authorization.
        dataset: Calibration set of its recipe; None where there is none.
        store: Store with calibrations for the forecast.
    """

    name: str
    way: Way
    url: str
    model: str
    tokenizer: Path | None
    max_prompt: int
    max_answer: int
    default_answer: int | None = None
    slo: Slo | None = None
    triton_metrics: str | None = None
    gateway_url: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    dataset: NamedDataset | LocalSource | None = None
    recipe: Recipe | None = None
    store: Store | None = None

    @classmethod
    def of_record(cls, record: RunningServer, slo: Slo | None, way: Way | None = None) -> Subject:
        """Make the subject of a deployment that runs on this machine.

            way: How to reach it; None for its gateway where it has one.

        Raises:
            UserError: It has no gateway, and one was asked for.
        """
        package = record.deployment.parent
        deployment = Deployment.load(package)
        if way == "gateway" and not record.gateway_url:
            raise UserError(f"{deployment.name} runs without a gateway: --way triton asks Triton itself")
        chosen: Way = way or ("gateway" if record.gateway_url else "triton")
        about: dict[str, Any] = {
            "package": deployment.digest,
            "runtime": deployment.runtime,
            "versions": deployment.versions,
            "started": record.started,
        }
        if (needs := deployment.requirements) is not None:
            about |= {"gpu": needs.gpu, "gpus": needs.gpus}
        return cls(
            name=deployment.name,
            way=chosen,
            url=record.gateway_url if chosen == "gateway" else record.target,
            model=deployment.name if chosen == "gateway" else deployment.entry_model,
            tokenizer=package / deployment.tokenizer_dir,
            max_prompt=deployment.limits.max_input_tokens,
            max_answer=deployment.limits.max_output_tokens,
            slo=slo,
            triton_metrics=record.metrics_url,
            gateway_url=record.gateway_url or None,
            about=about,
        )

    def target(self, timeout_s: float, *, chat: bool) -> Target:
        """Make a client of the server."""
        if self.way == "gateway":
            return OpenAITarget(self.url, self.model, timeout_s=timeout_s, headers=self.headers)
        return TritonTarget(self.url, self.model, self.tokenizer if chat else None, timeout_s=timeout_s)

    @property
    def described(self) -> dict[str, Any]:
        """The `target` of a result."""
        return {"way": self.way, "url": self.url, "model": self.model, **self.about}


def find_subject(name: str | None, settings: SubjectSettings, store: Store) -> Subject:
    """Find the server that is measured.

    Raises:
        ServerError: The deployment does not run.
        InvalidInput: There is no such deployment or recipe.
        UserError: It has no gateway, and one was asked for.
    """
    targets = dict(settings.slo)
    key = os.environ.get("PIPELINE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if settings.url is not None:
        http = settings.is_http
        return Subject(
            name=settings.url,
            way="gateway" if http else "triton",
            url=settings.url,
            model=settings.model or ENTRY,
            tokenizer=settings.tokenizer,
            max_prompt=_LONGEST_PROMPT,
            max_answer=_LONGEST_ANSWER,
            default_answer=_USUAL_ANSWER,
            slo=Slo(**targets) if targets else None,
            gateway_url=settings.url.rstrip("/").removesuffix("/v1") if http else None,
            headers=headers,
        )
    assert name is not None, "a name or an address is given"
    named = find_deployment(name, (), store, wait_s=settings.wait_s)
    slo = {**(named.recipe.slo.model_dump(exclude_none=True) if named.recipe.slo else {}), **targets}
    calibration = named.recipe.quantization.calibration
    return replace(
        Subject.of_record(named.require_server(store), Slo(**slo) if slo else None, settings.way),
        dataset=None if calibration is None else calibration.dataset,
        headers=headers,
        recipe=named.recipe,
        store=store,
    )
