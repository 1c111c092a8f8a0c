"""Our sources around the engine, with the tensors of older versions: a real server, real text.

Behind them stands the cpu engine, with those versions' tensors, too; it does not know the old names of sampling
tensors, so what is tested of them is that a request with them passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from pipeline.progress import Silent
from pipeline.runtimes import Engines
from pipeline.runtimes.cpu import model_repository
from pipeline.runtimes.cpu.model_repository import package_cpu
from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import CHECKPOINTS, SETTINGS
from tests.support.streams import joined

pytestmark = pytest.mark.servers

PROMPT = TURN.format(QUESTIONS[0])


@pytest.mark.parametrize(
    ("version", "known", "unknown"),
    [
        ("1.0.0", {"min_tokens": 2, "return_num_input_tokens": True}, {"min_length": 2}),
    ],
)
def test_text_goes_through_the_models_of_each_version(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    known: dict[str, object],
    unknown: dict[str, object],
) -> None:
    monkeypatch.setattr(model_repository, "CONTRACT", version)
    sources = Engines(package.parent / "target", None, CHECKPOINTS / "support-target")
    package_cpu("old", SETTINGS, sources, tmp_path / "package", Silent())
    with TritonServer.of_package(tmp_path / "package", log_file=tmp_path / "log") as server:
        asked = {"text_input": PROMPT, "max_tokens": 16, "stream": True}
        text = joined(server.grpc_url, "tensorrt_llm_bls", **asked)
        assert text
        assert joined(server.grpc_url, "tensorrt_llm_bls", **asked, **known) == text
        assert joined(server.grpc_url, "ensemble", **asked, **known).strip() == text.strip()
        # The entry model takes some of them by their older names; the ensemble takes what upstream's does.
        with pytest.raises(InferenceServerException, match="unexpected inference input"):
            joined(server.grpc_url, "ensemble", **asked, **unknown)
