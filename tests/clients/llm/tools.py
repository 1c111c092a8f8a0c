"""Simon Willison's llm: a chain of tools."""

import json
import os
import sys
from pathlib import Path

os.environ["LLM_USER_PATH"] = os.environ["HOME"]
model = {
    "model_id": "deployed",
    "model_name": os.environ["MODEL"],
    "api_base": os.environ["OPENAI_BASE_URL"],
    "supports_tools": True,
}
(Path(os.environ["HOME"]) / "extra-openai-models.yaml").write_text(json.dumps([model]))

import llm  # noqa: E402  it reads the file when it is imported

RESULTS = json.loads(os.environ["RESULTS"])
calls = []


def track_order(order: str) -> str:
    """Find out where an order is."""
    calls.append(["track_order", {"order": order}])
    return json.dumps(RESULTS["track_order"][order])


def send_invoice(order: str) -> str:
    """Send the invoice of an order."""
    calls.append(["send_invoice", {"order": order}])
    return json.dumps(RESULTS["send_invoice"][order])


def answer(question: str) -> dict:
    calls.clear()
    chain = llm.get_model("deployed").chain(
        question, tools=[track_order, send_invoice], options={"temperature": 0}
    )
    text = "".join(chain)
    return {"calls": list(calls), "answer": text}


print(json.dumps([answer(question) for question in sys.argv[1:]]))
