"""Check that a server that was ready still works: every model in the path is asked for a token about once a second.

A model that hangs and one that is merely busy both let a probe wait. They are told apart by progress: while probes
wait, Triton's page of metrics is read, and a server is hung only if

- no model in the path of the probe has done anything since: no request was completed, no step of the engine made
  (`iteration_counter`, which TensorRT-LLM's backend and our engine publish; `pipeline_responses_total` of our `llmapi`
  model), nor, where the engine computes in these processes, processor time used; Triton that does not show the page
  makes no progress, either;
- or the engine has room, so that the probe does not wait there, and neither it nor a second one is answered.

Busy is not ill: a probe that waits behind long answers may wait for ever. Besides, the processes of the server are
looked at several times a second: one of a model that is gone, or any that is stopped (SIGSTOP), is a fault at once.

A slow server counts as working, and so does one whose answers are wrong.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import ServerError
from pipeline.keeper import HealthIssue
from pipeline.process_state import HELD_UP_S, STOPPED_S, ProcessStat
from pipeline.serving.live import MetricsPage
from pipeline.serving.probe import HealthProbe
from pipeline.triton.deployment import DRAFT_MODEL, Deployment

# Counters of a model that grow whenever it does something, as `MetricsPage` names them; one value of `_ENGINE` is one.
_PROGRESS = (
    "nv_inference_request_success_total",
    "nv_inference_request_failure_total",
    "nv_inference_exec_count_total",
    "pipeline_responses_total",
)
_ENGINE, _STEPS_MADE = "nv_trt_llm_general_metrics", "iteration_counter"
_REQUESTS = "nv_trt_llm_request_metrics"
ENSEMBLE = "ensemble"
# Models of the ensemble.
_STEPS = ("preprocessing", "tensorrt_llm", "postprocessing")

_FIRST_POLL_S = 0.01
_PAGE_TIMEOUT_S = 0.5
_PAGE_INTERVAL_S = 0.3
# A probe that takes longer is looked into.
_LATE_S = 0.5
# Probes that fail one after the other: one may be a mishap.
_FAILURES = 3
# Share of a core: an idle server uses less.
_COMPUTING_SHARE = 0.1
# A step of an engine that computes here may take so long.
_COMPUTING_S = 60.0
# Process of a Python model, as far as /proc has its name.
_STUB = "triton_python_b"


def progress_of(page: MetricsPage, model: str) -> float:
    """Sum the counters of a model that grow whenever it does something."""
    done = sum(page.total(name, model=model) or 0.0 for name in _PROGRESS)
    return done + (page.total(_ENGINE, model=model, general_type=_STEPS_MADE) or 0.0)


def has_room(page: MetricsPage, model: str) -> bool | None:
    """Tell whether an engine could take a request at once: places are free, and all that it has are being generated.

    None for a model that does not tell, such as one without an engine.
    """
    counts = page.by(_REQUESTS, "request_type", model=model)
    if not counts:
        return None
    active, scheduled = counts.get("active", 0), counts.get("scheduled", 0)
    free = active < counts.get("max", 0)
    return free and scheduled >= active and not counts.get("context") and not counts.get("waiting")


class ProgressJudge:
    """Decides whether a probe that is late hangs, from what was seen while it waited. Pure, without a clock."""

    def __init__(self, models: Sequence[str], hang_timeout_s: float) -> None:
        """`models` are those in the path of the probe; `hang_timeout_s` is as in `HealthMonitor`."""
        self._models, self._timeout_s = models, hang_timeout_s
        self.reset()

    def reset(self) -> None:
        """Forget what was seen, when a probe was answered."""
        self._progress: tuple[float, ...] = ()
        # Since then, no counter moved.
        self._still_since: float | None = None
        # Since then, no counter moved, and no processor time was used.
        self._idle_since: float | None = None
        self._room_since: float | None = None
        self._cpu_s: float | None = None
        # Time of the last call of `judge`.
        self._judged_at = -math.inf
        self._asked_again = False

    def judge(
        self, now: float, waits_s: float, page: MetricsPage | None, cpu_s: float | None
    ) -> HealthVerdict:
        """Take in what was seen, and decide.

        Args:
            now: Time by any clock that runs evenly, in seconds.
            waits_s: Time for which the probe has been under way.
            page: Triton's metrics; None if it does not answer.
            cpu_s: Processor time that the server has used, in seconds; None where that says nothing, because the
                engine computes elsewhere.
        """
        self._take_in(now, page, cpu_s)
        assert self._still_since is not None, "it was just set"
        assert self._idle_since is not None, "it was just set"
        if waits_s >= self._timeout_s:
            reason = (
                "Triton does not show its metrics" if page is None else "no model in its path shows progress"
            )
            if now - self._idle_since >= self._timeout_s / 2:
                return HealthVerdict("hung", reason)
            if now - self._still_since >= _COMPUTING_S:
                return HealthVerdict("hung", f"{reason}, though it computes")
        room_s = 0.0 if self._room_since is None else now - self._room_since
        if room_s >= self._timeout_s and not self._asked_again:
            self._asked_again = True
            return HealthVerdict("ask again", "")
        if room_s >= 2 * self._timeout_s:
            return HealthVerdict("hung", "the engine has room for it")
        return HealthVerdict("wait", "")

    def _take_in(self, now: float, page: MetricsPage | None, cpu_s: float | None) -> None:
        moved = False
        if page is not None:
            progress = tuple(progress_of(page, model) for model in self._models)
            moved, self._progress = progress != self._progress, progress
        computes = False
        if cpu_s is not None:
            used_s = 0.0 if self._cpu_s is None else cpu_s - self._cpu_s
            computes, self._cpu_s = used_s > _COMPUTING_SHARE * (now - self._judged_at), cpu_s
        # When this process was held up itself, what it saw before says nothing.
        held_up, self._judged_at = now - self._judged_at > HELD_UP_S, now
        if moved or held_up or self._still_since is None:
            self._still_since = now
        if moved or held_up or computes or self._idle_since is None:
            self._idle_since = now
        rooms = [] if page is None else [has_room(page, model) for model in self._models]
        engines = [room for room in rooms if room is not None]
        if held_up or not (engines and all(engines)):
            self._room_since = None
        elif self._room_since is None:
            self._room_since = now


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """Decision about a probe that is late.

    Attributes:
        kind: "wait": it may wait behind others. "ask again": its answer may be lost. "hung": the server is.
        reason: Reason why the server is hung.
    """

    kind: Literal["wait", "ask again", "hung"]
    reason: str


class ProcessWatch:
    """Watches the processes of a server that is ready: whether they are there, and run."""

    def __init__(self, pids: Sequence[int]) -> None:
        stats = {pid: ProcessStat.of(pid) for pid in pids}
        self._known = {pid: stat for pid, stat in stats.items() if stat is not None}
        self._stopped_since: dict[int, float] = {}

    def check(self, now: float) -> HealthIssue | None:
        """Check the processes. Returns a fault or a doubt, None if there is none."""
        for pid, known in self._known.items():
            stat = ProcessStat.of(pid)
            if stat is None or stat.start != known.start:
                # Others, such as a compiler that the engine started, may come and go; the server's end is no secret.
                if known.name == _STUB:
                    return HealthIssue("fault", f"process {pid} ({known.name}) is gone")
                continue
            if not stat.stopped:
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) >= STOPPED_S:
                return HealthIssue("fault", f"process {pid} ({known.name}) is stopped")
        if self._stopped_since:
            return HealthIssue("doubt", f"process {min(self._stopped_since)} is stopped")
        return None

    def cpu_s(self) -> float:
        """Return the processor time that they have used together."""
        stats = (ProcessStat.of(pid) for pid in self._known)
        return sum(stat.cpu_s for stat in stats if stat is not None)


@dataclass(slots=True)
class _ProbedModel:
    """A model that is asked, and the judge of its answers."""

    probe: HealthProbe
    judge: ProgressJudge
    next_ask: float = 0.0


class HealthMonitor:
    """Watches one start of a server. `check` is to be called several times a second, and takes little time."""

    def __init__(
        self,
        deployment: Deployment,
        grpc_url: str,
        metrics_url: str,
        pids: Sequence[int],
        *,
        interval_s: float = 1.0,
        hang_timeout_s: float | None = None,
    ) -> None:
        """
        Args:
            pids: Processes of the server, where this machine shows them.
            interval_s: Time between probes; 0 makes none, and looks at the processes only.
            hang_timeout_s: Time without an answer and without progress after which a server counts as hung; None for
                what the deployment's longest step may take (`default_hang_timeout_s`).
        """
        self._metrics_url, self._interval_s = metrics_url, interval_s
        self._processes = ProcessWatch(pids)
        self._computes_here = deployment.runtime == "cpu"
        timeout_s = default_hang_timeout_s(deployment) if hang_timeout_s is None else hang_timeout_s
        paths = probed_paths(deployment) if interval_s else {}
        self._paths = [
            _ProbedModel(HealthProbe(grpc_url, model), ProgressJudge(path, timeout_s))
            for model, path in paths.items()
        ]
        self._next_page = 0.0

    def first_round(self, deadline_s: float, stop: threading.Event) -> None:
        """Wait until every model in the path has answered, or `stop` is set.

        Raises:
            ServerError: One has not answered within the deadline, or has answered by an error.
        """
        deadline = time.monotonic() + deadline_s
        for path in self._paths:
            path.probe.ask(timeout_s=deadline_s)
        for probe in (path.probe for path in self._paths):
            while not probe.answered and not stop.wait(_FIRST_POLL_S):
                if probe.failures:
                    raise ServerError(probe.error)
                if time.monotonic() > deadline:
                    raise ServerError(f"{probe.model} gave no answer within {deadline_s:.0f} s")

    def check(self) -> HealthIssue | None:
        """Continue probing. Returns the worst fault or doubt, None if there is none."""
        now = time.monotonic()
        issues = [self._processes.check(now)]
        late = [path for path in self._paths if self._is_late(path, now)]
        if late and now >= self._next_page:
            self._next_page = now + _PAGE_INTERVAL_S
            page = MetricsPage.fetch(self._metrics_url, _PAGE_TIMEOUT_S)
            cpu_s = self._processes.cpu_s() if self._computes_here else None
            issues += [self._judge(path, now, page, cpu_s) for path in late]
        for probe in (path.probe for path in self._paths):
            if probe.failures:
                kind: Literal["doubt", "fault"] = "fault" if probe.failures >= _FAILURES else "doubt"
                issues.append(HealthIssue(kind, probe.error))
        known = [issue for issue in issues if issue is not None]
        return next((issue for issue in known if issue.kind == "fault"), known[0] if known else None)

    def close(self) -> None:
        """Stop probing. To be called when the server is gone, or before it is stopped."""
        for path in self._paths:
            path.probe.close()

    def _is_late(self, path: _ProbedModel, now: float) -> bool:
        """Send a probe if one is due. Returns whether one has been under way for longer than is usual."""
        since = path.probe.outstanding_since
        if since is not None:
            return now - since > _LATE_S
        path.judge.reset()
        if now >= path.next_ask:
            path.next_ask = now + self._interval_s
            path.probe.ask()
        return False

    @staticmethod
    def _judge(
        path: _ProbedModel, now: float, page: MetricsPage | None, cpu_s: float | None
    ) -> HealthIssue | None:
        probe, since = path.probe, path.probe.outstanding_since
        if since is None:
            # It has just been answered.
            return None
        verdict = path.judge.judge(now, now - since, page, cpu_s)
        if verdict.kind == "ask again":
            probe.ask_again()
        if verdict.kind != "hung":
            return None
        return HealthIssue(
            "fault", f"{probe.model} has not answered for {now - since:.1f} s, and {verdict.reason}"
        )


def default_hang_timeout_s(deployment: Deployment) -> float:
    """Decide for how many seconds a server may be without any progress.

    An engine shows progress when a step has ended. A step that takes in a prompt of 16,384 tokens, the longest that
    engines are usually built to take at once, is far below three seconds on the GPUs that serve such models; longer
    prompts may be taken at once, too. TensorRT-LLM's LLM API tunes kernels when it meets new shapes, and says nothing
    meanwhile.
    """
    base_s = 10.0 if deployment.runtime == "pytorch" else 3.0
    return base_s * max(1.0, deployment.limits.max_input_tokens / 16_384)


def probed_paths(deployment: Deployment) -> dict[str, tuple[str, ...]]:
    """Decide which models are asked: those that take requests, and the draft, without which answers only slow down.

    Returns:
        Model that is asked -> the models whose work its answer takes.
    """
    models = deployment.models
    paths = {deployment.entry_model: tuple(dict.fromkeys((deployment.entry_model, "tensorrt_llm")))}
    if ENSEMBLE in models:
        paths[ENSEMBLE] = (ENSEMBLE, *_STEPS)
    if DRAFT_MODEL in models:
        paths[deployment.entry_model] += (DRAFT_MODEL,)
        paths[DRAFT_MODEL] = (DRAFT_MODEL,)
    return paths
