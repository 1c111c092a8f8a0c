"""Settings of a client: how long it waits, how often it tries again, how it keeps a connection alive."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long to wait for a server, in seconds; None waits for ever.

    Time that the application spends between two reads is not counted.

    Attributes:
        connect_s: to reach the server and read the model's configuration; needed once per client.
        first_token_s: from sending a request to its first token: connecting, queueing, prompt processing, retries.
        between_tokens_s: from one chunk to the next.

    Raises:
        ValueError: a value is not more than 0.

    >>> Timeouts(first_token_s=5)
    Timeouts(connect_s=5.0, first_token_s=5, between_tokens_s=30.0)
    """

    connect_s: float | None = 5.0
    first_token_s: float | None = 60.0
    between_tokens_s: float | None = 30.0

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_token_s", "between_tokens_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value!r}: must be more than 0, or None to wait for ever")


@dataclass(frozen=True, slots=True)
class Retries:
    """When to repeat a request that failed before its first token: exponential backoff with jitter.

    Only lost servers (`ConnectFailed`) and full ones (`Busy`) are retried; with several servers, the next one is asked
    at once. An answer that had begun is not repeated: `ServerLost` says how much of it came.

    Attributes:
        attempts: attempts in all, the first included; 1 never retries.
        first_s: backoff before the second attempt, in seconds; it doubles with each further attempt.
        longest_s: upper limit of the backoff, in seconds.
        wait_s: how long to go on asking a lost server beyond `attempts`, in seconds from the first attempt, so that its
            restart is waited for; `Timeouts.first_token_s` ends it, too.

    Raises:
        ValueError: `attempts` is less than 1, or `wait_s` is negative.

    >>> Retries(wait_s=30)
    Retries(attempts=3, first_s=0.05, longest_s=2.0, wait_s=30)
    """

    attempts: int = 3
    first_s: float = 0.05
    longest_s: float = 2.0
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts = {self.attempts}: must be 1 or more")
        if not self.wait_s >= 0:
            raise ValueError(f"wait_s = {self.wait_s!r}: must be 0 or more")

    def backoff_s(self, failures: int) -> float:
        """Seconds to wait after so many failures; half is random, so that clients do not return together.

        Args:
            failures: attempts that have failed so far, 1 or more.

        Returns:
            Seconds: between half of the backoff and all of it, and at most `longest_s`.
        """
        most = min(self.first_s * 2.0 ** (failures - 1), self.longest_s)
        return float(most * (0.5 + 0.5 * random.random()))


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """HTTP/2 pings on a silent connection: a dead connection is noticed, and a firewall does not cut a quiet one.

    A server closes connections that ping more often than it allows. Triton and gRPC allow one ping in 300 s by default;
    for more, start the server with `--grpc-http2-min-recv-ping-interval-without-data`.

    Attributes:
        time_s: seconds of silence before a ping.
        timeout_s: seconds to wait for its answer before the connection counts as lost.
        while_idle: also ping while no stream is open.
    """

    time_s: float = 300.0
    timeout_s: float = 20.0
    while_idle: bool = False
