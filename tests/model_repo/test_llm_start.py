"""What the `llmapi` model reads before the LLM starts: its settings, its GPUs, its place among MPI's ranks."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.model_repo.conftest import SOURCES

sys.path.insert(0, str(SOURCES / "llmapi" / "1"))

from llm_settings import LlmSettings, choose_gpus, gpus_of


def config(count: int, gpus: str | None = None) -> dict[str, Any]:
    parameters = {} if gpus is None else {"gpu_device_ids": {"string_value": gpus}}
    return {"instance_group": [{"count": count}], "parameters": parameters}


def test_one_instance_sees_all_gpus() -> None:
    assert gpus_of(config(1), "tensorrt_llm_0_0") == ()
    assert gpus_of(config(1, "0,1"), "tensorrt_llm_0_0") == ()


def test_an_instance_has_the_gpus_at_its_number() -> None:
    given = config(2, "0,1; 2,3")
    assert gpus_of(given, "tensorrt_llm_0_0") == ("0", "1")
    assert gpus_of(given, "tensorrt_llm_0_1") == ("2", "3")


@pytest.mark.parametrize("gpus", [None, "", "0", "0;1;2", "0;"])
def test_instances_without_gpus_are_refused(gpus: str | None) -> None:
    with pytest.raises(ValueError, match="must name GPUs for each of 2 instances"):
        gpus_of(config(2, gpus), "tensorrt_llm_0_0")


@pytest.mark.parametrize("name", ["tensorrt_llm", "tensorrt_llm_0_2"])
def test_an_instance_without_a_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="does not end in a number below 2"):
        gpus_of(config(2, "0;1"), name)


def test_workers_do_not_find_the_rank_that_started_them() -> None:
    of_a_rank = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_UNIVERSE_SIZE",
        "OMPI_MCA_orte_x",
        "ORTE_a",
        "PMI_FD",
        "PMIX_RANK",
    )
    kept = {"OMPI_MCA_btl": "a", "PMIX_MCA_b": "b", "PATH": "c", "OMPI_ALLOW_RUN_AS_ROOT": "1"}  # fmt: skip
    environment = {**dict.fromkeys(of_a_rank, "1"), **kept}
    choose_gpus(("2", "3"), environment)
    assert environment == kept | {"CUDA_VISIBLE_DEVICES": "2,3", "TRTLLM_VISIBLE_DEVICES": "2,3"}


def test_paths_of_the_settings_become_absolute_where_there_is_such_a_folder(tmp_path: Path) -> None:
    for name in ("checkpoint", "draft"):
        (tmp_path / name).mkdir()
    (tmp_path / "model.yaml").write_text(
        "model: checkpoint\ntokenizer: someone/tokenizer\ndtype: draft\n"
        "speculative_config: {decoding_type: DraftTarget, speculative_model_dir: draft, max_draft_len: 2}\n"
        "triton_config: {max_batch_size: 0, decoupled: true, cancellation_check_period_ms: 20, max_open_requests: 3}\n"
    )
    settings = LlmSettings.read(tmp_path / "model.yaml")
    assert settings.arguments["model"] == str(tmp_path / "checkpoint")
    assert settings.arguments["tokenizer"] == "someone/tokenizer"
    assert settings.arguments["dtype"] == "draft"
    assert settings.arguments["speculative_config"]["speculative_model_dir"] == str(tmp_path / "draft")
    assert "triton_config" not in settings.arguments
    assert (settings.cancellation_check_period_s, settings.max_open_requests) == (0.02, 3)
    with pytest.raises(ValueError, match="is missing: it holds the arguments"):
        LlmSettings.read(tmp_path / "other.yaml")


def test_settings_of_upstream_that_the_model_has_no_code_for_are_refused(tmp_path: Path) -> None:
    for text, name in (
        ("triton_config: {multimodal: true}", "triton_config.multimodal: this model takes text alone"),
        ("logits_post_processors: {a: b:c}", "logits_post_processors: this model runs none"),
    ):
        (tmp_path / "model.yaml").write_text(f"model: someone/model\n{text}\n")
        with pytest.raises(ValueError, match=name):
            LlmSettings.read(tmp_path / "model.yaml")


@pytest.mark.parametrize("decoupled", [True, False])
def test_settings_say_whether_it_streams_where_the_config_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoupled: bool
) -> None:
    """Triton asks for them unless it is started with --disable-auto-complete-config."""
    monkeypatch.setattr(
        sys.modules["triton_python_backend_utils"], "get_model_dir", lambda: str(tmp_path), raising=False
    )
    spec = spec_from_file_location("llmapi_model", SOURCES / "llmapi" / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    model = module_from_spec(spec)
    spec.loader.exec_module(model)
    said: dict[str, Any] = {}
    config = SimpleNamespace(
        set_model_transaction_policy=said.update, set_max_batch_size=lambda size: said.update(size=size)
    )
    settings = f"model: someone/model\ntriton_config: {{max_batch_size: 0, decoupled: {decoupled}}}\n"
    (tmp_path / "model.yaml").write_text(settings)
    assert model.TritonPythonModel.auto_complete_config(config) is config
    assert said == {"decoupled": decoupled, "size": 0}


class Ranks:
    """tensorrt_llm and mpi4py as one rank of several sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
        self.waited: list[object] = []
        ranks = self

        class Executor:
            def __init__(self, comm: object) -> None:
                ranks.waited.append(comm)

            def __enter__(self) -> str | None:
                return "executor" if rank == 0 else None

            def __exit__(self, *_: object) -> None:
                pass

        self.comm = SimpleNamespace(Get_size=lambda: size, rank=rank)
        made = {
            "tensorrt_llm": {},
            "tensorrt_llm._utils": {"global_mpi_rank": lambda: rank, "global_mpi_size": lambda: size},
            "tensorrt_llm.llmapi": {"MpiCommSession": lambda comm, n_workers: (comm, n_workers)},
            "mpi4py": {},
            "mpi4py.MPI": {"COMM_WORLD": self.comm},
            "mpi4py.futures": {"MPICommExecutor": Executor},
        }
        for name, content in made.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "llm_ranks", raising=False)
        import llm_ranks

        monkeypatch.delitem(sys.modules, "llm_ranks")
        self.module = llm_ranks


def test_the_leader_of_several_ranks_has_a_session_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, rank=0, size=4)
    assert ranks.module.is_leader()
    assert ranks.module.with_session({"model": "m"}) == {"model": "m", "_mpi_session": (ranks.comm, 4)}
    with pytest.raises(RuntimeError, match="rank0 is a worker, but MPI made it the leader"):
        ranks.module.work_for_leader()


def test_the_others_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, rank=2, size=4)
    assert not ranks.module.is_leader()
    ranks.module.work_for_leader()
    assert ranks.waited == [ranks.comm]


def test_one_rank_starts_what_it_needs_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, rank=0, size=1)
    assert ranks.module.with_session({"model": "m"}) == {"model": "m"}
