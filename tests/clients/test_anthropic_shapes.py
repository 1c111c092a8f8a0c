"""Anthropic's API beside plain answers, as Anthropic's client judges it, through the gateway of a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.client.testing import Reply
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.api.tools.dialects import ToolDialect, dialects
from tests.gateway.conftest import Start, starter
from tests.gateway.test_reasoning import CALLED, SPECIAL, pieces, template_of, written
from tests.support.programs import Program


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:
        yield starter(tmp_path, stack)


def test_all_shapes_are_anthropics(tmp_path: Path, start: Start) -> None:
    running = start(
        Reply(["On its", " waySTO", "P"]),
        aliases=("small",),
        batches=BatchStorage(BatchFolder(tmp_path / "batches")),
    )
    variables = {"GATEWAY_URL": running.url, "MODEL": "tiny"}
    said = Program.install("anthropic_python", variables).script("shapes.py")
    block = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert said == {
        "stopped": {"ends": [["On its way", "stop_sequence", "STOP"]] * 2, "request_id": True},
        "events": ["message_start", "ping", *block, "message_delta", "message_stop"],
        "models": {"listed": ["tiny", "small"], "one": "tiny"},
        "too_long": ["invalid_request_error", ["tokens", ">"], True],
        "document": 5,
        "unknown": [],
        "batch": {"results": {"good": "succeeded", "bad": "errored"}, "listed": [True], "deleted": True},
    }


@pytest.mark.parametrize(
    "dialect", {dialect.form: dialect for dialect in dialects()}.values(), ids=lambda dialect: dialect.name
)
def test_reasoning_and_calls_of_every_form(start: Start, dialect: ToolDialect) -> None:
    running = start(Reply(pieces(written(dialect))), template=template_of(dialect), special=SPECIAL)
    variables = {"GATEWAY_URL": running.url, "MODEL": "tiny"}
    said = Program.install("anthropic_python", variables).script("reasoning.py")
    kinds = ["thinking", "text", "tool_use"]
    assert said == {"kinds": kinds, "thinking": "Seven it is.", "signed": [True], "input": CALLED}
    assert "Seven it is." in running.upstream.requests[-1].prompt
