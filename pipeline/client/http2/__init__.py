"""gRPC calls that are answered by a stream, over HTTP/2 on the event loop itself.

gRPC's own asyncio client takes each message through three threads, which costs more than all else that is done with
it. Here what the connection brings is cut up where it arrives. Only what such calls need is spoken: RFC 9113 without
push and priorities, gRPC over it without compression, TLS or proxies of the environment.
"""

from __future__ import annotations

from pipeline.client.http2.call import EOF, Call
from pipeline.client.http2.calls import Calls

__all__ = ["EOF", "Call", "Calls"]
