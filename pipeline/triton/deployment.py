"""deployment.json: what a client, a launcher and a cache must know of a package, without reading its models.

It lies beside `model_repository/`, and all its paths are relative to the folder that holds both. Names that every
repository shares are here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import Fault, InvalidInput
from pipeline.reading import read_text

if TYPE_CHECKING:
    from pipeline.recipe import Recipe

FILE, REPOSITORY = "deployment.json", "model_repository"
VERSION = "1"  # folder of a model's files
TOKENIZER = f"{VERSION}/tokenizer"  # relative to the model's folder
ENTRY = "tensorrt_llm_bls"  # the model that clients talk to
TARGET_MODEL, DRAFT_MODEL = "tensorrt_llm", "tensorrt_llm_draft"  # the models that hold an engine
CONTAINER_ROOT = "/deployment"  # where a container sees the package; paths of C++ backends begin with it


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class DeploymentLimits(_Section):
    """Limits of one request, and of requests at the same time."""

    max_input_tokens: int
    max_output_tokens: int
    max_concurrency: int
    max_draft_tokens: int = 0


class Requirements(_Section):
    """Machine that the engines were made for; they run on nothing else."""

    tensorrt_llm: str  # version that built the engines, or whose LLM API the arguments are for
    tensorrt: str | None = None  # that the engines were built with; None where there are none
    image: str  # container that serves, with its tag (and its digest if that was known)
    driver: str  # oldest driver that the container runs with
    gpu: str  # name in the contracts: "h100-sxm-80g"
    sm: int  # compute capability, 90 for 9.0
    gpus: int  # how many


class LaunchSpec(_Section):
    """Start of the server, as far as the models decide it.

    single        one process, engines of one rank
    leader        one process a rank, by mpirun: one engine over several GPUs
    orchestrator  one process, which spawns a worker for each rank of each engine: several engines, some with several
                  ranks, or several instances of one
    llmapi        one process a rank below the LLM API's own wrapper; or one process, where there is one rank, where
                  `mpi` is off, or where there are several instances: then the LLM API starts its workers
    """

    mode: Literal["single", "leader", "orchestrator", "llmapi"] = "single"
    world_size: int = Field(default=1, ge=1)  # ranks of one instance of the target
    engine_models: tuple[str, ...] = ()  # models that hold an engine: those that ranks above 0 load
    gpu_device_ids: dict[str, tuple[tuple[int, ...], ...]] = Field(
        default_factory=dict
    )  # model -> GPUs of each instance
    mpi: bool = True  # llmapi only: whether mpirun starts the ranks
    shm_mib: int = 64  # shared memory that the Python models use; ranks need more, see serving.launch_gpu
    weights_gib: float = 0.0  # of all ranks: what has to be loaded before it is ready

    @property
    def instances(self) -> int:
        """Number of instances of the target."""
        return max((len(groups) for groups in self.gpu_device_ids.values()), default=1)

    @property
    def workers(self) -> int:
        """Processes that hold a part of an engine."""
        named = [group for groups in self.gpu_device_ids.values() for group in groups]
        return max(self.world_size, sum(map(len, named)))


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
    guided_decoding: bool = False  # whether a request may ask for an answer that has a form
    structural_tags: bool = (
        False  # whether that form may be a structural tag: free text with calls of tools in it
    )
    adapters: tuple[str, ...] = ()  # LoRA adapters that requests may name; the first has number 1
    digest: str  # SHA-256 (hex) over the names and contents of the repository's files
    versions: dict[str, str]  # what it was packaged with
    requirements: Requirements | None = None  # None: this machine's CPU will do
    launch: LaunchSpec = LaunchSpec()

    @property
    def start_deadline_s(self) -> float:
        """Time for a start, unless another one is set.

        Two minutes for the processes and a first answer, and for each GiB of weights the time of a cold network volume
        (128 MiB/s). The LLM API captures CUDA graphs and tunes kernels, too: five minutes more.
        """
        return 120.0 + 8.0 * self.launch.weights_gib + (300.0 if self.runtime == "pytorch" else 0.0)

    @classmethod
    def load(cls, package: Path) -> Deployment:
        """Read the deployment.json of a package.

        Raises:
            InvalidInput, UnreadableFile: There is none, or it is not one.
        """
        path = package / FILE
        if not path.exists():
            raise InvalidInput(
                str(package), [Fault(f"no {FILE}", fix="name the folder that `pipeline build` made")]
            )
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            faults = [
                Fault(fault["msg"], where=FILE, key=".".join(map(str, fault["loc"])))
                for fault in error.errors()
            ]
            raise InvalidInput(str(package), faults) from None

    def save(self, package: Path) -> None:
        """Write the deployment.json of a package."""
        (package / FILE).write_text(self.model_dump_json(indent=2, by_alias=True) + "\n", encoding="utf-8")


def package_recipe(package: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe that a package alone amounts to: its name, its limits, and no response cache.

    Raises:
        InvalidInput: The overrides have faults, or the package cannot be read.
    """
    from pipeline.recipe.loading import recipe_of_values
    from pipeline.recipe.recipe import RecipeProvenance

    deployment = Deployment.load(package)
    limits = deployment.limits.model_dump(
        include={"max_input_tokens", "max_output_tokens", "max_concurrency"}
    )
    source = f"local:{(package / deployment.tokenizer_dir).absolute()}"
    values = {"name": deployment.name, "model": {"source": source}, "limits": limits}
    recipe = recipe_of_values(values, overrides, str(package))
    return recipe.read_from(RecipeProvenance(None, tuple(overrides)))
