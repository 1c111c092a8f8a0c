"""Exchange of the package that a deployment is served from, while it is served.

    rollout    the new package is started beside the old one, on free ports; verified, warmed up, and asked its golden
               questions; then the record is switched, the gateway goes over, the old Triton completes what it has
               under way, and ends
    rollback   the same with the package that was served before

Until the switch, every failure ends the new Triton and leaves the old one untouched; so does a cancellation. When the
gateway cannot load the new package, the switch is undone. With `in_place` the old Triton ends first, for two that do
not fit in memory. Requests then wait in the gateway, and if the new package fails, the old one is started again.

`pipeline.prepare.second_server` decides whether two fit, before this is asked for.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.client import ChatTemplate, Client, ClientError, TemplateError
from pipeline.errors import ServerError, UserError
from pipeline.golden import GoldenComparison, GoldenReport, GoldenSet
from pipeline.golden_questions import GoldenQuestion
from pipeline.keeper import StartCancelled
from pipeline.progress import Progress
from pipeline.serving.launch import ServeOptions
from pipeline.serving.live import OPENER, MetricsPage
from pipeline.serving.ports import Ports
from pipeline.serving.settings import ExchangeSettings
from pipeline.serving.supervisor import Supervisor
from pipeline.serving.triton_component import TritonComponent
from pipeline.triton.deployment import TARGET_MODEL
from pipeline.triton.repository import check_package
from pipeline.triton.running import RunningServer

_POLL_S = 0.25
# A gateway looks at the record several times a second, and then loads the new package's tokenizer.
_FOLLOW_S = 60.0
# So long every gateway of this store has had to see the record, also one that this supervisor knows nothing of.
_GRACE_S = 2.0
# The engine's counts are renewed twice a second.
_IDLE_S = 1.5
_ANSWER_S = 10.0

# Maker of a Triton for a package, not started; it raises the reasons that keep this machine from serving it.
MakeTriton = Callable[[Path, ServeOptions, Progress], TritonComponent]


class RolloutRequest(BaseModel):
    """A request on the control socket; see `Rollouts`.

    Attributes:
        recipe: Arguments of a command line that name the package's recipe and its store.
        settings: Values of the recipe that the package is served with; None for those of the old package.
        golden: Whether its golden questions are asked.
        in_place: Whether the old Triton ends before the new one starts.
        drain_s: Time for requests that the old Triton has under way, in seconds.
    """

    model_config = ConfigDict(frozen=True, strict=True)
    name: str
    package: str = ""
    recipe: list[str] = []
    settings: dict[str, Any] | None = None
    golden: bool = True
    in_place: bool = False
    drain_s: float = Field(default=ExchangeSettings().drain_s, ge=0, le=86_400)

    @classmethod
    def read(cls, request: Mapping[str, Any]) -> Self:
        """Raises UserError, with everything that is wrong."""
        try:
            return cls.model_validate({name: value for name, value in request.items() if value is not None})
        except ValidationError as error:
            faults = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            raise UserError("; ".join(faults)) from None

    @property
    def folder(self) -> Path:
        return Path(self.package)


class Rollout:
    """One exchange, in the thread of its request."""

    def __init__(
        self,
        request: RolloutRequest,
        supervisor: Supervisor,
        make: MakeTriton,
        progress: Progress,
        *,
        compare: bool,
    ) -> None:
        """`compare`: hold answers to those of the package that is served, where the golden budgets say so."""
        self.request, self._compare = request, compare
        # Ends the rollout, if the switch has not been made; the supervisor ends; the rollout is over.
        self.cancelled, self.ending, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._make, self._progress = make, progress
        self._keeper = supervisor.tritons[request.name]
        self._announcement = supervisor.announcements[request.name]
        self._has_gateway = bool(self._announcement.record.gateway_url)
        # The Triton that is served while this begins; a restart changes nothing of it.
        self._old: TritonComponent = self._keeper.component  # type: ignore[assignment]
        self._record = self._announcement.record
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Exchange the package. Raises the error that keeps it from being served; the old package is then served."""
        request, began = self.request, self._began
        self._progress.say(f"{request.name}: from {self._old.package} to {request.folder}")
        report = self._in_place() if request.in_place else self._side_by_side()
        took_s = time.monotonic() - began
        self._progress.say(f"{request.name} is served from {request.folder}, after {took_s:.1f} s")
        return {
            "name": request.name,
            "package": str(request.folder),
            "previous": str(self._old.package),
            **self._keeper.component.addresses,
            "golden": report,
            "seconds": round(took_s, 2),
        }

    def _side_by_side(self) -> dict[str, int] | None:
        ports = self._old.server.ports.moved()
        new = self._make_new(ports)
        with self._or_ended(new):
            new.start(self.cancelled)
            report = self._judge(new, beside=self._old)
            if self.cancelled.is_set():
                raise StartCancelled("cancelled")
            self._progress.say(f"switching to {new.server.target}")
            self._keeper.exchange(new, lambda: self._announce(new, self._record_of(new)))
        try:
            self._wait_for_gateway(new)
        except ServerError:
            # The old Triton runs still, so nothing is lost.
            self._keeper.exchange(self._old, lambda: self._announce(self._old, self._record))
            new.stop(at_once=False)
            raise
        self._drain(self._old)
        self._old.stop(at_once=False)
        return report

    def _in_place(self) -> dict[str, int] | None:
        """End the old Triton first. Its ports are free then, and stay those of the deployment."""
        check_package(self.request.folder, self._old.options.hashes, self._progress)
        GoldenSet.load(self.request.folder)
        old, ports = self._old, self._old.server.ports
        began = time.monotonic()
        self._keeper.exchange(
            _PlaceholderComponent(),
            lambda: self._announcement.set_state("triton", "restarting", "its package is exchanged in place"),
        )
        try:
            self._drain(old)
            old.stop(at_once=False)
            new = self._make_new(ports)
            with self._or_ended(new):
                new.start(self.cancelled)
                report = self._judge(new)
        except BaseException as error:
            if self.ending.is_set():
                raise
            self._progress.say(f"{error}\nstarting the old package again")
            old.stop(at_once=True)
            old.start(self.ending)
            self._keeper.exchange(old, lambda: self._announce(old, self._record))
            raise
        self._keeper.exchange(new, lambda: self._announce(new, self._record_of(new)))
        self._progress.say(f"nothing was served for {time.monotonic() - began:.1f} s")
        return report

    def _make_new(self, ports: Ports) -> TritonComponent:
        old = self._old
        # The log of the old Triton is still written, and read if it fails.
        name = "triton-2.log" if old.server.log_file.name == "triton.log" else "triton.log"
        log = old.server.log_file.with_name(name)
        options = replace(
            old.options,
            ports=ports,
            triton=old.options.triton.model_copy(update={"log": log}),
            recipe=tuple(self.request.recipe) or old.options.recipe,
            settings=old.options.settings if self.request.settings is None else self.request.settings,
        )
        new = self._make(self.request.folder, options, self._progress)
        if new.name != self.request.name:
            raise UserError(f"{self.request.folder} is a package of {new.name}, not of {self.request.name}")
        return new

    def _judge(self, new: TritonComponent, beside: TritonComponent | None = None) -> dict[str, int] | None:
        """Ask the golden questions, also of the old package `beside`. Raises ServerError if they are over a budget."""
        golden = GoldenSet.load(new.package)
        if golden is None or not self.request.golden:
            self._progress.say(
                "its golden questions are skipped" if golden else "the package has no golden questions"
            )
            return None
        report: GoldenReport | GoldenComparison
        counts = {"questions": len(golden.questions)}
        if golden.budgets.compares and self._compare and beside is not None:
            report = golden.compare(_asker(beside, self.cancelled), _asker(new, self.cancelled))
            counts |= {"right": report.report.right, "equal": report.equal, "similar": report.similar}
        else:
            if golden.budgets.compares:
                why = "this is a way back" if beside is not None else "the old package has ended"
                self._progress.say(f"its answers are not held to those of the old package: {why}")
            report = golden.ask(_asker(new, self.cancelled))
            counts |= {"right": report.right}
        self._progress.say(str(report))
        if not report.passed:
            raise ServerError(f"{self.request.folder} is not served: {report}")
        return counts

    def _record_of(self, new: TritonComponent) -> RunningServer:
        return replace(
            self._record,
            deployment=new.package / "deployment.json",
            log=new.server.log_file.absolute(),
            recipe=new.options.recipe,
            settings=new.options.settings,
            previous=self._old.package,
        )

    def _announce(self, triton: TritonComponent, record: RunningServer) -> None:
        changed = ("deployment", "log", "recipe", "settings", "previous")
        fields = {name: getattr(record, name) for name in changed}
        self._announcement.exchange(triton.server.entry_model, **triton.addresses, **fields)

    def _wait_for_gateway(self, new: TritonComponent) -> None:
        """Wait until the gateway has gone over. Raises ServerError if it cannot."""
        began = time.monotonic()
        while self._has_gateway and not self.ending.wait(_POLL_S):
            status = self._gateway_status()
            if status is not None:
                model = status["models"][self.request.name]
                if model["endpoints"] == [new.server.target]:
                    break
                fault = status["faults"].get(self.request.name)
                # What it says in the first moments may be about an earlier record.
                if fault and status["ready"] and time.monotonic() - began > _GRACE_S:
                    raise ServerError(f"the gateway cannot go over to {self.request.folder}: {fault}")
            if time.monotonic() - began > _FOLLOW_S:
                # It is being restarted, and will then find the new Triton.
                self._progress.say(f"the gateway has not gone over within {_FOLLOW_S:g} s")
                break
        self.ending.wait(_GRACE_S)

    def _drain(self, old: TritonComponent) -> None:
        """Wait until no request is under way with the old Triton."""
        deadline = time.monotonic() + self.request.drain_s
        last, idle_since = -1, time.monotonic()
        while not self.ending.wait(_POLL_S) and old.server.running:
            requests = self._requests_left(old)
            if requests:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > _IDLE_S:
                return
            if requests and requests != last:
                self._progress.say(f"the old package has {requests} requests under way")
                last = requests
            if time.monotonic() > deadline:
                self._progress.say(
                    f"{requests} requests are cut off: they took longer than {self.request.drain_s:g} s"
                )
                return

    def _requests_left(self, old: TritonComponent) -> int:
        """Count requests that the gateway has sent to the old Triton, or that the engine has, whichever are more."""
        page, status = MetricsPage.fetch(old.server.metrics_url), self._gateway_status()
        kinds = (
            {} if page is None else page.by("nv_trt_llm_request_metrics", "request_type", model=TARGET_MODEL)
        )
        sent = 0 if status is None else status["models"][self.request.name]["replaced_requests"]
        return max(int(sent), int(kinds.get("active", 0)))

    def _gateway_status(self) -> dict[str, Any] | None:
        """Ask for the gateway's /readyz; None if it does not answer."""
        if not self._has_gateway:
            return None
        try:
            with OPENER.open(f"{self._record.gateway_url}/readyz", timeout=_ANSWER_S) as answer:
                status: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            status = json.load(error)
        except (OSError, ValueError):
            return None
        return status

    @contextmanager
    def _or_ended(self, new: TritonComponent) -> Iterator[None]:
        """End the new Triton if the block fails."""
        try:
            yield
        except StartCancelled as error:
            new.stop(at_once=True)
            raise ServerError(f"the rollout to {self.request.folder} was cancelled") from error
        except BaseException:
            new.stop(at_once=True)
            raise


class _PlaceholderComponent:
    """A component that is kept between two Tritons."""

    kind, title = "triton", "Triton"
    pids: tuple[int, ...] = ()
    addresses: Mapping[str, str] = MappingProxyType({})

    def start(self, stop: threading.Event) -> None:
        pass

    def check(self) -> None:
        pass

    def stop(self, *, at_once: bool) -> None:
        pass


def _asker(triton: TritonComponent, cancelled: threading.Event) -> Callable[[GoldenQuestion], str]:
    """Make a function that asks a Triton a golden question, greedily."""
    deployment = triton.server.deployment
    try:
        template = ChatTemplate.from_directory(triton.package / deployment.tokenizer_dir)
    except TemplateError:
        template = None
    most = deployment.limits.max_output_tokens

    def answer(question: GoldenQuestion) -> str:
        if cancelled.is_set():
            raise StartCancelled("cancelled")
        try:
            with Client(triton.server.target, model=deployment.entry_model, template=template) as client:
                tokens = min(question.max_tokens or most, most)
                return client.generate(question.input, max_tokens=tokens, temperature=0).text
        except ClientError as error:
            raise ServerError(f"golden question {question.text!r} to {triton.package}: {error}") from error

    return answer
