"""deployment.json: what a client, a launcher and a cache must know of a package, without reading its models.

It lies beside `model_repository/`, and all its paths are relative to the folder that holds both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import Fault, InvalidInput

FILE, REPOSITORY = "deployment.json", "model_repository"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class DeploymentLimits(_Section):
    """What one request may ask for, and how many run at once."""

    max_input_tokens: int
    max_output_tokens: int
    max_concurrency: int
    max_draft_tokens: int = 0


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
