"""Addresses of servers that are announced and do not run."""

from __future__ import annotations

# For `RunningServer.of`.
ADDRESSES = {
    "grpc_url": "127.0.0.1:1",
    "http_url": "http://127.0.0.1:1",
    "metrics_url": "http://127.0.0.1:1/metrics",
}
