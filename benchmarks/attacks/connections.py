"""Attacks by connections that are held: without a word, and by clients that do not read, on a machine that is busy."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from urllib.parse import urlsplit

from benchmarks.attacks import Target, attack

SILENT, UNREAD, HELD_S = 1_050, 60, 15.0
_BUSY = "while True: pass"


@attack(
    "connections-held", "1,050 connections without a key, and 60 streams that are not read, on a busy machine"
)
async def held(target: Target) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(os.cpu_count() or 1)]
    try:
        await asyncio.gather(
            *(_hold(target, b"GET /v1/models HTTP/1.1\r\nHost: ") for _ in range(SILENT)),
            *(_hold(target, _stream_of(target)) for _ in range(UNREAD)),
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _stream_of(target: Target) -> bytes:
    body = json.dumps(
        {"model": target.model, "prompt": "Hello", "stream": True, "n": 4, "cache": False}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _hold(target: Target, sent: bytes) -> None:
    """Connect, send something, and read a byte a second."""
    address = urlsplit(target.record.gateway_url or "")
    try:
        # So little is read ahead that the gateway notices who does not read.
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
    except OSError as error:
        target.sent[type(error).__name__] += 1
        return
    try:
        writer.write(sent)
        async with asyncio.timeout(HELD_S):
            while await reader.read(1):
                await asyncio.sleep(1)
        target.sent["closed"] += 1
    except TimeoutError:
        target.sent["held"] += 1
    except ConnectionError as error:
        target.sent[type(error).__name__] += 1
    finally:
        writer.close()
