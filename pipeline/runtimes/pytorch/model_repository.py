"""A Triton model repository for the `pytorch` runtime: the config of its one model, and the folder on disk.

    model_repository/
      tensorrt_llm/   config.pbtxt, 1/{model.py, …, shared/, model.yaml, checkpoint/, draft/, adapters/, tokenizer/}
    deployment.json

Tensors are those of TensorRT-LLM's `llmapi` model of the version. It has no batch dimension. Whether it is decoupled,
and so can stream, stands in config.pbtxt as well as in model.yaml, because the launcher turns off the completion of
configs that upstream's model relies on.

Checkpoints are hard links. model.yaml names them relative to its own folder, so that the repository can be moved; the
model makes the paths absolute. The tokenizer's files are for clients, which make prompts from messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.contracts import llm_args, llmapi
from pipeline.contracts.inflight_batcher import TensorSpec
from pipeline.errors import StageError, UserError
from pipeline.models.adapter import WEIGHTS
from pipeline.models.folder import ADAPTER_CONFIG
from pipeline.models.token_ids import token_ids
from pipeline.progress import Progress
from pipeline.runtimes.base import Engines
from pipeline.triton.config import model_config
from pipeline.triton.deployment import (
    REPOSITORY,
    TARGET_MODEL,
    TOKENIZER,
    Deployment,
    DeploymentLimits,
    LaunchSpec,
    Requirements,
)
from pipeline.triton.repository import (
    content_digest,
    copy_tokenizer,
    finish,
    link_files,
    require,
    verify,
    versions,
    write_model,
)

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig


_UNBATCHED = 0
_PROMPT_LOG_PROBS = "sampling_param_prompt_logprobs"
# Upstream's llmapi model takes none. The names are those of its other models, so that a client sends the same to all.
_GUIDES = tuple(
    TensorSpec(name=name, data_type="TYPE_STRING", dims=(1,), optional=True)
    for name in ("guided_decoding_guide_type", "guided_decoding_guide")
)


@dataclass(frozen=True, slots=True)
class LlmapiSettings:
    """Serving settings of a recipe."""

    version: str  # of TensorRT-LLM
    ranks: int = 1  # GPUs of one instance
    instances: int = 1
    max_open_requests: int | None = None  # of one instance, running and waiting; None: no limit
    cancellation_check_period_ms: int = 100
    guided_decoding: bool = False
    decoupled: bool = True  # an answer may come in many responses; else in one
    prompt_log_probs: bool = False  # offered, because prompts are computed without reuse of the KV cache
    adapters: tuple[str, ...] = ()  # LoRA adapters that requests may name

    @property
    def gpus(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each instance."""
        return tuple(
            tuple(range(instance * self.ranks, (instance + 1) * self.ranks))
            for instance in range(self.instances)
        )


def llmapi_model(settings: LlmapiSettings) -> ModelConfig:
    """The config.

    Raises:
        UserError: The version is not known, or has no several instances.
    """
    have, own = llmapi.tensors(settings.version), llmapi.own_tensors(settings.version)
    inputs = (*have.inputs, *own.inputs, *(_GUIDES if settings.guided_decoding else ()))
    outputs = (*have.outputs, *own.outputs)
    if not settings.prompt_log_probs:
        inputs = tuple(tensor for tensor in inputs if tensor.name != _PROMPT_LOG_PROBS)
        outputs = tuple(tensor for tensor in outputs if not tensor.name.startswith("prompt_log_probs"))
    if settings.instances > 1 and not llmapi.has_instances(settings.version):
        raise UserError(
            f"runtime.instances = {settings.instances}: TensorRT-LLM {settings.version} has one instance only "
            f"(set runtime.instances to 1, or runtime.version to {llmapi.versions_where(llmapi.has_instances)})"
        )
    parameters = {"tokens_per_block": str(llmapi.tokens_per_block())}
    if settings.instances > 1:
        parameters["gpu_device_ids"] = ";".join(",".join(map(str, group)) for group in settings.gpus)
    return model_config(
        TARGET_MODEL,
        backend="python",
        max_batch_size=_UNBATCHED,
        instances=settings.instances,
        decoupled=settings.decoupled,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
    )


def model_yaml(settings: LlmapiSettings, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Content of model.yaml: the arguments of the LLM API, and the model's own section."""
    own: dict[str, Any] = {
        **llmapi.triton_config(settings.version),
        "max_batch_size": _UNBATCHED,
        "decoupled": settings.decoupled,
        "cancellation_check_period_ms": settings.cancellation_check_period_ms,
    }
    if ignored := llmapi.ignored_sampling(settings.version):
        own["ignored_sampling"] = list(ignored)
    if settings.adapters:
        own["adapters"] = [f"{ADAPTERS}/{name}" for name in settings.adapters]
    if settings.max_open_requests is not None:
        own["max_open_requests"] = settings.max_open_requests
    return {**arguments, "triton_config": own}


SOURCES = "llmapi"  # the folder in model_repo
CHECKPOINT, DRAFT, ADAPTERS, ARGUMENTS = "checkpoint", "draft", "adapters", "model.yaml"
_DRAFT_KEYS = ("speculative_model", "speculative_model_dir")
_REGION_MIB = 64  # shared memory of an instance: texts in and out


def package_llmapi(
    name: str,
    settings: LlmapiSettings,
    arguments: Mapping[str, Any],
    limits: DeploymentLimits,
    requirements: Requirements,
    sources: Engines,
    into: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Make `into/model_repository` and `into/deployment.json`; return the facts of them.

    Raises:
        StageError: A source lacks a file, TensorRT-LLM would refuse the arguments, or what was written does not read
            back as it was meant.
    """
    for folder in filter(None, (sources.target, sources.draft)):
        require(folder, "config.json")
    require(sources.target, "tokenizer.json")
    ids = token_ids(sources.tokenizer)
    config = llmapi_model(settings)
    repository = into / REPOSITORY
    version = write_model(config, repository, sources.tokenizer, sources=SOURCES)
    _link_all(sources.target, version / CHECKPOINT)
    if sources.draft is not None:
        _link_all(sources.draft, version / DRAFT)
    for name in settings.adapters:
        link_files(sources.adapters[name], version / ADAPTERS / name, (ADAPTER_CONFIG, WEIGHTS))
    copy_tokenizer(sources.tokenizer, repository / TARGET_MODEL / TOKENIZER)
    meant = model_yaml(settings, arguments)
    (version / ARGUMENTS).write_text(_yaml(settings.version, meant), encoding="utf-8")
    verify(repository, [config])
    _verify_arguments(settings.version, meant, version)
    progress.say("Reading the checkpoint once for the digest of the package")
    deployment = Deployment(
        name=name,
        runtime="pytorch",
        entry_model=TARGET_MODEL,
        models=(TARGET_MODEL,),
        limits=limits,
        tokenizer_dir=f"{REPOSITORY}/{TARGET_MODEL}/{TOKENIZER}",
        end_id=ids.end,
        pad_id=ids.pad,
        stop_token_ids=ids.stop,
        guided_decoding=settings.guided_decoding,
        structural_tags=settings.guided_decoding and llmapi.takes_structural_tags(settings.version),
        adapters=settings.adapters,
        digest=content_digest(repository),
        versions=versions(settings.version),
        requirements=requirements,
        launch=launch_spec(settings, _weights_bytes(version)),
    )
    return finish(deployment, into, progress)


def launch_spec(settings: LlmapiSettings, weights_bytes: int) -> LaunchSpec:
    """Start of the server: one that spreads the model itself, or one a rank below the LLM API's wrapper."""
    return LaunchSpec(
        mode="llmapi",
        world_size=settings.ranks,
        engine_models=(TARGET_MODEL,),
        gpu_device_ids={TARGET_MODEL: settings.gpus},
        shm_mib=_REGION_MIB * settings.instances,
        weights_gib=round(weights_bytes * settings.instances / 2**30, 3),
    )


def _yaml(version: str, content: Mapping[str, Any]) -> str:
    head = (
        f"# Arguments of TensorRT-LLM {version}'s LLM API (PyTorch backend), and `triton_config` of the Triton model.\n"
        "# Paths begin at this file's folder.\n"
    )
    return head + yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)


def _verify_arguments(version: str, meant: Mapping[str, Any], folder: Path) -> None:
    path = folder / ARGUMENTS
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    if read != meant:
        raise StageError(f"{path} does not say what was meant")
    arguments = {key: value for key, value in read.items() if key != "triton_config"}
    faults = [str(fault) for fault in llm_args.check(version, arguments)]
    speculation = arguments.get("speculative_config") or {}
    for named in (arguments["model"], *(speculation[key] for key in _DRAFT_KEYS if key in speculation)):
        if not (folder / named).is_dir():
            faults.append(f"{named}: no such folder beside {ARGUMENTS}")
    if faults:
        raise StageError(f"{path}: {'; '.join(faults)}")


def _link_all(source: Path, into: Path) -> None:
    names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file()]
    link_files(source, into, names)


def _weights_bytes(version: Path) -> int:
    folders = (version / CHECKPOINT, version / DRAFT)
    return sum(
        path.stat().st_size for folder in folders for path in folder.rglob("*.safetensors") if path.is_file()
    )
