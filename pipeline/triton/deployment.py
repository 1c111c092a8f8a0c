"""deployment.json: what a client, a launcher and a cache must know of a package, without reading its models.

It lies beside `model_repository/`, and all its paths are relative to the folder that holds both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import Fault, InvalidInput

FILE, REPOSITORY = "deployment.json", "model_repository"
CONTAINER_ROOT = "/deployment"  # where a container sees the package; paths of C++ backends begin with it


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class DeploymentLimits(_Section):
    """What one request may ask for, and how many run at once."""

    max_input_tokens: int
    max_output_tokens: int
    max_concurrency: int
    max_draft_tokens: int = 0


class Requirements(_Section):
    """What the machine must have: the engines were made for this and run on nothing else."""

    tensorrt_llm: str  # version that built the engines, or whose LLM API the arguments are for
    tensorrt: str | None = None  # that the engines were built with; None where there are none
    image: str  # container that serves, with its tag (and its digest if that was known)
    driver: str  # oldest driver that the container runs with
    gpu: str  # name in the contracts: "h100-sxm-80g"
    sm: int  # compute capability, 90 for 9.0
    gpus: int  # how many


class LaunchSpec(_Section):
    """How the server is started, as far as the models decide that."""

    mode: Literal["single", "leader", "orchestrator", "llmapi"] = "single"
    world_size: int = 1  # ranks of one instance of the target
    engine_models: tuple[str, ...] = ()  # models that hold an engine: those that ranks above 0 load
    gpu_device_ids: dict[str, tuple[tuple[int, ...], ...]] = Field(
        default_factory=dict
    )  # model -> GPUs of each instance
    shm_mib: int = 64  # shared memory that the server needs
    weights_gib: float = 0.0  # of all ranks: what has to be loaded before it is ready


class Deployment(_Section):
    """A packaged model repository.

    >>> Deployment.load(package).entry_model
    'tensorrt_llm_bls'
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str  # of the recipe
    runtime: Literal["cpu", "tensorrt", "pytorch"]
    entry_model: str  # the one that clients talk to
    models: tuple[str, ...]
    limits: DeploymentLimits
    tokenizer_dir: str  # relative to the package; holds the chat template, too
    end_id: int
    pad_id: int
    stop_token_ids: tuple[int, ...]  # tokens that end an answer besides end_id
    digest: str  # SHA-256 (hex) over the names and contents of the repository's files
    versions: dict[str, str]  # what it was packaged with
    requirements: Requirements | None = None  # None: this machine's CPU will do
    launch: LaunchSpec = LaunchSpec()

    @classmethod
    def load(cls, package: Path) -> Deployment:
        """Read the deployment.json of a package.

        Raises:
            InvalidInput: there is none, or it is not one.
        """
        path = package / FILE
        if not path.is_file():
            raise InvalidInput(
                str(package), [Fault(f"no {FILE}", fix="name the folder that `pipeline build` made")]
            )
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except ValidationError as error:
            faults = [
                Fault(fault["msg"], where=FILE, key=".".join(map(str, fault["loc"])))
                for fault in error.errors()
            ]
            raise InvalidInput(str(package), faults) from None

    def save(self, package: Path) -> None:
        """Write the deployment.json of a package."""
        (package / FILE).write_text(self.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")
