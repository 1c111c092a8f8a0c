"""Simon Willison's llm: the model as its file of further OpenAI models describes it; the command, and the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ["LLM_USER_PATH"] = os.environ["HOME"]
model = {
    "model_id": "deployed",
    "model_name": os.environ["MODEL"],
    "api_base": os.environ["OPENAI_BASE_URL"],
    "supports_tools": True,
}
# JSON is YAML.
(Path(os.environ["HOME"]) / "extra-openai-models.yaml").write_text(json.dumps([model]))
command = [Path(sys.executable).with_name("llm"), "-m", "deployed", "-o", "temperature", "0", "--no-stream"]
plain = subprocess.run([*command, sys.argv[1]], capture_output=True, text=True, check=True).stdout

import llm  # noqa: E402  it reads the file when it is imported

streamed = [text for text in llm.get_model("deployed").prompt(sys.argv[1], temperature=0) if text]
print(json.dumps({"plain": plain.removesuffix("\n"), "streamed": streamed}))
