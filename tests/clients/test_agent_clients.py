"""Programs that start at /v1/responses: an agent that hands over to another, and LangChain with use_responses_api."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby

from tests.support.programs import Program

RESULTS = json.dumps({"track_order": {"TP-174685": {"city": "Hamburg"}, "TP-205873": {"city": "Madrid"}}})
QUESTION, THEN = "Where is my order TP-174685?", "Is shipping free?"
ORDERS = ("TP-174685", "TP-205873")


def test_an_agent_hands_over(program: Callable[[str], Program]) -> None:
    """A call that must come hands over, another one calls a tool, and a third answer ends the run."""
    said = program("openai_agents").script("handoff.py", QUESTION, THEN, RESULTS=RESULTS)
    assert said["agent"] == "Support"
    assert said["names"][:3] == ["handoff_requested", "tool_called", "tool_output"]
    kinds = [kind for kind, _ in groupby(said["events"])]
    assert kinds.count("response.created") == kinds.count("response.completed") >= 3
    assert said["answer"]
    assert said["streamed"].endswith(said["answer"])
    assert said["then"]


def test_langchain(program: Callable[[str], Program]) -> None:
    said = program("langchain").script("responses_api.py", QUESTION, THEN, RESULTS=RESULTS)
    ((name, arguments),) = said["calls"]
    assert (name, arguments["order"] in ORDERS) == ("track_order", True)
    assert said["streamed calls"] == said["calls"]
    assert said["answer"]
    assert said["then"]
    assert "".join(said["streamed"]) == said["plain"]
    assert "50 dollars" in said["plain"]
    assert len(said["streamed"]) > 1
    assert said["form"] in ORDERS
    assert said["usage"] > 0
