"""Send the requests of a YAML file to a gateway, and print the answers.

A request has `path`, and may have `method`, `json`, `body`, `form`, `headers`, `keep` (a name for the `id` of the
answer, which later requests have as {name}) and `until` (fields that the answer must have; asked again until it has).
Deltas of a stream are joined: how many tokens come in one event depends on the machine.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

SHOWN = ("content-type", "x-cache", "cache-control", "www-authenticate", "allow", "retry-after", "location")
TEXTS = ("content", "text", "delta", "partial_json")


def main(file: Path, url: str) -> None:
    kept: dict[str, str] = {}
    with httpx.Client(base_url=url, timeout=120) as client:
        for request in yaml.safe_load(file.read_text(encoding="utf-8")):
            filled = _filled(request, kept)
            response = _ask(client, filled)
            deadline, wanted = time.monotonic() + 60, filled.get("until", {})
            while wanted and not wanted.items() <= response.json().items() and time.monotonic() < deadline:
                time.sleep(0.5)
                response = _ask(client, filled)
            if "keep" in filled:
                kept[filled["keep"]] = response.json().get("id", "none")
            print(f"=== {request.get('method', 'POST')} {request['path']} {_written(request)}")
            _print(response)


def _filled(value: Any, kept: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(entry, kept) for key, entry in value.items()}
    if isinstance(value, list):
        return [_filled(entry, kept) for entry in value]
    if isinstance(value, str):
        for name, id in kept.items():
            value = value.replace(f"{{{name}}}", id)
    return value


def _written(request: dict[str, Any]) -> str:
    named = {key: request[key] for key in ("json", "body", "form", "headers") if key in request}
    return json.dumps(named, ensure_ascii=False)[:400] if named else ""


def _ask(client: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    form = request.get("form", {})
    files = {"file": (form["filename"], form["content"].encode())} if form else None
    data = {key: value for key, value in form.items() if key not in ("filename", "content")} or None
    headers = {"Authorization": "Bearer sk-first"} | request.get("headers", {})
    if "body" in request:
        headers = {"Content-Type": "application/json"} | headers
    return client.request(
        request.get("method", "POST"), request["path"], json=request.get("json"), content=request.get("body"),
        data=data, files=files, headers=headers,
    )  # fmt: skip


def _print(response: httpx.Response) -> None:
    print(response.status_code, {name: response.headers[name] for name in SHOWN if name in response.headers})
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        print(*_joined(response.text), sep="\n")
    elif kind.startswith("application/json") and response.content:
        print(json.dumps(response.json(), indent=1, ensure_ascii=False))
    elif response.request.url.path == "/metrics":
        lines = {
            line if line.startswith("#") else line.rpartition(" ")[0] for line in response.text.splitlines()
        }
        print(*sorted(line for line in lines if "_bucket{" not in line), sep="\n")
    else:
        print(response.text)
    print()


def _joined(stream: str) -> list[str]:
    """The events of a stream, with the texts of neighbours joined that differ in nothing else."""
    events: list[str] = []
    skeleton, text = "", ""
    for block in stream.strip().split("\n\n"):
        head, _, data = block.rpartition("data: ")
        try:
            event = json.loads(data)
        except ValueError:
            event = data
        delta: list[str] = []
        shape = head.replace("\n", " ") + json.dumps(_without_delta(event, delta), ensure_ascii=False)
        if delta and shape == skeleton:
            text += delta[0]
            events[-1] = f"{shape}  <- {text!r}"
        else:
            skeleton, text = shape, delta[0] if delta else ""
            events.append(f"{shape}  <- {text!r}" if delta else shape)
    return events


def _without_delta(value: Any, delta: list[str], name: str = "") -> Any:
    """The event without its text, which goes into `delta`, and without its number."""
    if isinstance(value, dict):
        is_delta = (
            "choices" in value or str(value.get("type", "")).endswith("delta") or name in ("delta", "choices")
        )
        return {
            key: delta.append(entry) or "…"
            if is_delta and key in TEXTS and isinstance(entry, str) and entry
            else "N" if key == "sequence_number"
            else _without_delta(entry, delta, key)
            for key, entry in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [_without_delta(entry, delta, name) for entry in value]
    return value


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
