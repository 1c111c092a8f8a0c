"""Servers behind a DNS name: `dns:NAME:PORT` stands for every address that the name has, and is asked again and again.

A headless Service of Kubernetes is such a name: its addresses are those of the pods that are ready. A name that has no
address now, or cannot be resolved, keeps those that it had: a server that is gone is noticed by its connection, and a
DNS server that is away takes no model server with it.

What it does not do: SRV records, and the EndpointSlices of Kubernetes, which would need an account that may read them.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakMethod

_log = logging.getLogger("pipeline.client")

_PREFIX = "dns:"
# Seconds from one answer to the next question. Answers of a cluster's DNS are valid for about as long.
_INTERVAL_S = 5.0

# host:port of a server -> the name that it was found by; empty for a server that was given by its address.
Servers = Mapping[str, str]


def is_name(url: str) -> bool:
    """Whether a URL stands for all addresses of a DNS name."""
    return url.startswith(_PREFIX)


def is_well_formed(url: str) -> bool:
    """Whether a URL that begins as those of DNS names is well-formed: `dns:NAME:PORT`."""
    name, colon, port = url.removeprefix(_PREFIX).partition(":")
    return bool(name and colon) and "/" not in name and port.isdecimal() and 0 < int(port) < 2**16


def resolve(url: str) -> tuple[str, ...]:
    """Ask the system for all IPv4 and IPv6 addresses of a name, however long that takes.

    Args:
        url: `dns:NAME:PORT`.

    Returns:
        host:port of each, in order.

    Raises:
        OSError: the name has no address, or DNS does not answer.
    """
    name, _, port = url.removeprefix(_PREFIX).partition(":")
    hosts = {str(address[0]) for *_, address in socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)}
    return tuple(sorted(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts))


class DnsWatch:
    """Asks DNS every few seconds for the servers of a client, in a thread, as long as the client lives.

    Attributes:
        first_lookup: set when all names have been asked for the first time.
        fault: reason why a name could not be resolved the last time; empty if all could.
    """

    def __init__(self, urls: Sequence[str], on_servers: Callable[[Servers], None]) -> None:
        """
        Args:
            urls: names, and addresses that stay as they are.
            on_servers: a method of the client, called in the thread with all servers after each question to DNS.
        """
        self.first_lookup = threading.Event()
        self.fault = ""
        self._urls, self._on_servers = tuple(urls), WeakMethod(on_servers)
        self._known: dict[str, tuple[str, ...]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipeline-client-dns", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            servers = self._ask()
            if (callback := self._on_servers()) is None:
                return
            callback(servers)
            self.first_lookup.set()
            # Else the client would live as long as this thread.
            del callback
            self._closed.wait(_INTERVAL_S)

    def _ask(self) -> Servers:
        servers: dict[str, str] = {}
        faults = []
        for url in self._urls:
            if not is_name(url):
                servers[url] = ""
                continue
            try:
                now = resolve(url)
            # A label that is too long is a UnicodeError.
            except (OSError, UnicodeError) as error:
                faults.append(f"{url}: {getattr(error, 'strerror', None) or error}")
            else:
                if now != self._known.get(url):
                    _log.info("%s: %s", url, ", ".join(now))
                self._known[url] = now
            servers |= dict.fromkeys(self._known.get(url, ()), url.removeprefix(_PREFIX).partition(":")[0])
        fault = "; ".join(faults)
        if fault and fault != self.fault:
            note = f"; asked on: {', '.join(servers)}" if servers else ""
            _log.warning("%s%s", fault, note)
        self.fault = fault
        return servers
