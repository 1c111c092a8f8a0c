"""As much of Kubernetes' API server as `kubectl apply` of Deployments asks for: objects, kept as they are sent.

Patches are applied as JSON merge patches (RFC 7386): of a strategic merge patch that is the same but for lists.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Object = dict[str, Any]
_VERBS = ["create", "get", "list", "patch", "update"]
_RESOURCES = {
    "/apis/apps/v1": [{"name": "deployments", "singularName": "deployment", "kind": "Deployment"}],
    "/api/v1": [],
}


class ApiServer:
    """A context manager. `objects` has what was applied, by name; `patches` every patch of an object, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.patches: list[tuple[str, Object]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def merged(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    base = dict(value) if isinstance(value, dict) else {}
    for key, part in patch.items():
        if part is None:
            base.pop(key, None)
        elif not key.startswith("$"):
            base[key] = merged(base.get(key), part)
    return base


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/api":
                self._answer({"kind": "APIVersions", "versions": ["v1"]})
            elif path == "/apis":
                version = {"groupVersion": "apps/v1", "version": "v1"}
                group = {"name": "apps", "versions": [version], "preferredVersion": version}
                self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})
            elif path in _RESOURCES:
                found = [{**resource, "namespaced": True, "verbs": _VERBS} for resource in _RESOURCES[path]]
                version = path.removeprefix("/apis/").removeprefix("/api/")
                self._answer({"kind": "APIResourceList", "groupVersion": version, "resources": found})
            else:
                name = path.rpartition("/")[2]
                self._answer(server.objects.get(name))

        def do_POST(self) -> None:
            made = self._body()
            # Kubernetes' default.
            made["spec"].setdefault("replicas", 1)
            server.objects[made["metadata"]["name"]] = made
            self._answer(made)

        def do_PATCH(self) -> None:
            name, patch = self.path.partition("?")[0].rpartition("/")[2], self._body()
            server.patches.append((name, patch))
            made = merged(server.objects[name], patch)
            made["spec"].setdefault("replicas", 1)
            server.objects[name] = made
            self._answer(made)

        def _body(self) -> Object:
            body: Object = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            return body

        def _answer(self, value: Object | None) -> None:
            missing = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }
            text = json.dumps(value or missing).encode()
            self.send_response(200 if value else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler
