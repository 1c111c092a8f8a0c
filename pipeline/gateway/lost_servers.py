"""Blame for the lost servers of one model, in an event loop: refuses requests, ends turns in time, and logs the blamed.

`blame.LossJudge` decides. A request is recognized by its digest, however often and by whichever way it comes again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from math import inf
from typing import Any

from pipeline.client import ClientError, ConnectFailed, ServerLost
from pipeline.gateway.blame import Attempt, LossJudge, Refusal, Work, tenant_hold
from pipeline.gateway.errors import QUARANTINED, ApiError
from pipeline.gateway.redis_losses import RedisLosses

_log = logging.getLogger("pipeline.gateway")

_DIGEST_BYTES = 16
# Timers of uvloop fire up to a millisecond early.
_LATE_S = 0.002


def work_digest(tenant: str, model: str, prompt: object, sampling: Mapping[str, Any]) -> str:
    """Compute the digest of a request.

    Args:
        prompt: text or token ids, as the engine gets them.
        sampling: parameters, without a seed that was drawn for the request.
    """
    text = json.dumps([tenant, model, prompt, sorted(sampling.items())], default=list)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def took_request(error: ClientError) -> bool:
    """Whether a server may have begun to work on the request that failed so, and was lost with it."""
    return isinstance(error, ServerLost) or (isinstance(error, ConnectFailed) and error.taken)


class LostServers:
    """Blame for the lost servers of one model; `clock` gives monotonic time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.judge = LossJudge()
        self._clock = clock
        self._shared: RedisLosses | None = None

    def share(self, shared: RedisLosses) -> None:
        """Count losses together with other gateways from now on."""
        self._shared = shared
        shared.listen(lambda waits: self.judge.hold_elsewhere(self._clock(), waits))

    def refusal(self, work: Work) -> ApiError | None:
        """Return why a request is not sent now: 500, if it is quarantined; 429, if its tenant cools down."""
        now = self._clock()
        for begun in self.judge.settle(now):
            text = "tenant %s: servers were lost with its requests %d times; it cools down for %.0f s"
            _log.error(text, begun.tenant, begun.convictions, begun.wait_s)
            if self._shared is not None:
                self._shared.hold(tenant_hold(begun.tenant), begun.wait_s)
        refusal = self.judge.refusal(now, work)
        return None if refusal is None else _error(refusal)

    def is_suspect(self, work: Work) -> bool:
        """Whether a request goes out in its tenant's turn only."""
        return self.judge.is_suspect(self._clock(), work)

    def may_begin(self, work: Work) -> bool:
        """Whether a request need not wait for the end of another tenant's turn."""
        return self.judge.may_begin(self._clock(), work)

    def begin(self, work: Work) -> Attempt:
        """Note that a request is sent; `attempt` or `give_up` follows."""
        return self.judge.began(self._clock(), work)

    def give_up(self, attempt: Attempt) -> None:
        """Note that the request is not sent after all."""
        self.judge.left(attempt)

    @contextmanager
    def attempt(self, attempt: Attempt, changed: Callable[[], None]) -> Iterator[None]:
        """Send a request within the block. An error of its server that leaves the block counts as a loss.

        Args:
            attempt: by `begin`.
            changed: is called when the turn of its tenant may be over, and others may begin.
        """
        judge, timer = self.judge, None
        if attempt.trial_until < inf:
            left_s = attempt.trial_until - self._clock() + _LATE_S
            timer = asyncio.get_running_loop().call_later(left_s, changed)
        try:
            yield
        except ClientError as error:
            if took_request(error):
                self._note_loss(attempt, error.url)
            else:
                judge.left(attempt)
            raise
        except BaseException:
            judge.left(attempt)
            raise
        else:
            if judge.passed(attempt) and self._shared is not None:
                self._shared.report_pass(attempt.work.digest)
        finally:
            if timer is not None:
                timer.cancel()

    def server_gone(self, url: str) -> None:
        """Note that a server cannot be reached."""
        self.judge.server_gone(self._clock(), url)

    def server_well(self, url: str) -> None:
        """Note that a server answers."""
        self.judge.server_well(self._clock(), url)

    def _note_loss(self, attempt: Attempt, url: str) -> None:
        work = attempt.work
        _log.warning("%s was lost with request %s in flight", url, work.request_id)
        now = self._clock()
        self._note_quarantine(work, self.judge.lost(now, attempt, url))
        if self._shared is not None and attempt.blamed:

            def counted(losses: int) -> None:
                refusal = self.judge.lost_elsewhere(self._clock(), work.digest, losses)
                self._note_quarantine(work, refusal)

            self._shared.report_loss(work.digest, now - attempt.began, counted)

    def _note_quarantine(self, work: Work, quarantine: Refusal | None) -> None:
        if quarantine is None:
            return
        text = "request %s was in flight at %d losses of servers; requests equal to it are refused for %.0f s"
        _log.error(text, work.request_id, quarantine.count, quarantine.wait_s)
        if self._shared is not None:
            self._shared.hold(work.digest, quarantine.wait_s)


def _error(refusal: Refusal) -> ApiError:
    wait_s = refusal.wait_s
    if refusal.kind == "quarantined":
        text = (
            f"A server of the model was lost {refusal.count} times while it worked on this request, which may be the "
            f"cause: for {wait_s:.0f} s no request equal to it is sent to a server"
        )
        return ApiError(500, text, code=QUARANTINED, retry_after_s=wait_s)
    text = (
        f"Servers of the model were lost {refusal.count} times with requests of this key, and of no other, in flight: "
        f"for {wait_s:.0f} s its requests are not sent to a server"
    )
    return ApiError(429, text, code="tenant_cooling_down", retry_after_s=wait_s)
