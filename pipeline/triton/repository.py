"""Files of a model repository, as every package on disk has them: written, and verified.

    model_repository/<model>/{config.pbtxt, 1/…}
    deployment.json

Each model's folder holds all that it needs. Files of engines and checkpoints are hard links where the file system
allows, so that weights are not stored twice. Which models there are is decided elsewhere.

`check_package` tells whether a package is what was built: its files against the SHA-256 of each, in the manifest that
lies beside them. What Triton runs, configurations and the tokenizer are read whenever they are used, which takes
milliseconds; weights once, and again when the file has changed or was last read a month ago (`pipeline.store.
FileHashes`). A package that came without its manifest is held against the one digest in its deployment.json, which is
that of all models together.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__, resources
from pipeline.errors import DamagedArtifact, StageError
from pipeline.models.chat_template import template_sources
from pipeline.progress import Progress
from pipeline.reading import UnreadableFile, open_file, sha256_of
from pipeline.store import Artifact, FileEntry, FileHashes, Manifest, check, manifest, signature
from pipeline.store.artifact import SMALL_BYTES
from pipeline.store.signature import VerifyKeys
from pipeline.triton.config import parameters_of, parse, render
from pipeline.triton.deployment import CONTAINER_ROOT, FILE, REPOSITORY, TOKENIZER, VERSION, Deployment

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

# What travels with a model of the tokenizer's files: what encodes, and what makes prompts from messages.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def write_model(
    config: ModelConfig, repository: Path, tokenizer: Path, *, sources: str | None = None
) -> Path:
    """Write a model's config, our sources if it is a Python model, and the tokenizer's files if it handles text.

    `sources`: the folder in model_repo, where it has another name than the model.

    Returns:
        The folder of its version, for what else belongs there.

    Raises:
        StageError: A value of the config holds a placeholder.
    """
    folder = repository / config.name
    version: Path = folder / VERSION
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(render(config), encoding="utf-8")
    models = resources.folder("model_repo")
    if config.backend == "python":
        copy_sources(models / (sources or config.name) / VERSION, version)
        copy_sources(models / "shared", version / "shared")
    elif config.platform == "ensemble":
        (version / ".keep").touch()  # Triton wants the folder, and many tools do not copy an empty one
    if parameters_of(config).get("tokenizer_dir") == TOKENIZER:
        copy_tokenizer(tokenizer, folder / TOKENIZER)
    return version


def copy_sources(source: Path, into: Path) -> None:
    """Copy Python sources, without byte-code."""
    shutil.copytree(source, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)


def copy_tokenizer(source: Path, into: Path) -> None:
    """Copy those of a checkpoint's files that encode text and make prompts from messages.

    A template of ours, which config.json stands for, is written out: packages hold no config.json.
    """
    into.mkdir(parents=True)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, into / name)
    with suppress(UnreadableFile):
        if not template_sources(into) and (own := template_sources(source).get("default")):
            (into / "chat_template.jinja").write_text(own, encoding="utf-8")


def link_files(source: Path, into: Path, names: Iterable[str]) -> None:
    """Hard links to files of a folder; copies, where the file system allows no link. Names may hold folders.

    Raises:
        StageError: A file is missing.
    """
    for name in names:
        if not (source / name).is_file():
            raise StageError(f"{source}: no {name}")
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, into / name)
        except OSError:  # another file system
            shutil.copyfile(source / name, into / name)


def require(folder: Path, *names: str) -> None:
    """Check that a folder has these files. Raises StageError if one is missing."""
    for name in names:
        if not (folder / name).is_file():
            raise StageError(f"{folder}: no {name}")


def verify(repository: Path, configs: Sequence[ModelConfig]) -> None:
    """Read everything back: each config as it was meant, each file that it names, each source that Python can read.

    Raises:
        StageError: Something is missing or different.
    """
    for config in configs:
        folder = repository / config.name
        if parse((folder / "config.pbtxt").read_text(encoding="utf-8")) != config:
            raise StageError(f"{folder}/config.pbtxt does not say what was meant")
        for name, value in parameters_of(config).items():
            if _names_path(name, value) and not _inside(repository, folder, value).exists():
                raise StageError(f"{config.name}: parameter {name} = {value}: no such file or folder")
        if config.backend == "python":
            for source in (folder / VERSION).rglob("*.py"):
                ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
            if not (folder / VERSION / "model.py").is_file():
                raise StageError(f"{config.name}: no {VERSION}/model.py")
    links = [path for path in repository.rglob("*") if path.is_symlink()]
    if links:
        raise StageError(f"{links[0]}: a repository that can be moved has no symbolic links")


def finish(deployment: Deployment, into: Path, progress: Progress) -> dict[str, Any]:
    """Write deployment.json beside a verified repository; return the facts of the package."""
    deployment.save(into)
    files = [path for path in (into / REPOSITORY).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    progress.say(
        f"Triton model repository of {len(deployment.models)} models, {len(files)} files, {size / 2**20:.1f} MiB"
    )
    return {
        "models": list(deployment.models),
        "entry_model": deployment.entry_model,
        "files": len(files),
        "bytes": size,
        "digest": deployment.digest,
        "end_id": deployment.end_id,
        "stop_token_ids": list(deployment.stop_token_ids),
    }


def content_digest(*folders: Path, sha256: Callable[[Path], str] = sha256_of) -> str:
    """SHA-256 (hex) over the relative names and contents of all files in the folders, byte-code left out."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(folder).as_posix()}\0{sha256(path)}\n".encode())
    return digest.hexdigest()


@cache
def source_digest(*folders: Path) -> str:
    """Digest of folders that travel with this installation, which does not change while a program runs."""
    return content_digest(*folders)


def versions(contract: str, *distributions: str) -> dict[str, str]:
    """Versions for a package's deployment.json; `contract` is the TensorRT-LLM whose tensors it has."""
    installed = {name: metadata.version(name) for name in distributions}
    return {"pipeline": __version__, "tensors": contract, **installed}


def _names_path(name: str, value: str) -> bool:
    return bool(value) and name.endswith(("_path", "_dir")) and not _is_elsewhere(value)


def _is_elsewhere(value: str) -> bool:
    """Whether a path is one of the container, not of the package."""
    return value.startswith("/") and not value.startswith(f"{CONTAINER_ROOT}/")


def _inside(repository: Path, folder: Path, value: str) -> Path:
    """A path that a model names, as it is here: it begins at CONTAINER_ROOT, or at the model's folder."""
    if value.startswith(f"{CONTAINER_ROOT}/"):
        return repository.parent / value.removeprefix(f"{CONTAINER_ROOT}/")
    return folder / value


def is_no_weight(name: str, entry: FileEntry) -> bool:
    """Tell whether a file of a package is one that a gateway needs: what Triton runs, configurations, the tokenizer."""
    return entry.bytes <= SMALL_BYTES or f"/{TOKENIZER}/" in name


def check_signature(package: Path) -> None:
    """Hold a package against the public keys of $PIPELINE_VERIFY_KEY, if that is set.

    Raises:
        DamagedArtifact: It is not signed by one of them, or holds files that the signed manifest does not name.
        UserError: The keys cannot be read.
    """
    keys = VerifyKeys.configured()
    if keys is None:
        return
    keys.check_folder(package)
    # Python runs what lies in __pycache__ beside a module, too.
    present = {str(path.relative_to(package)) for path in package.rglob("*") if not path.is_dir()}
    known = {manifest.FILE, manifest.TWIN, signature.FILE, *Manifest.load(package).files}
    if strange := sorted(present - known):
        raise DamagedArtifact(f"{package}: has files that are not signed: {', '.join(strange)}")


def check_without_weights(package: Path, hashes: FileHashes, progress: Progress) -> None:
    """Hold all but large files against the manifest, if there is one, and that against its signature.

    Raises:
        DamagedArtifact: With all that differ; or it is not signed, and $PIPELINE_VERIFY_KEY asks for it.
    """
    check_signature(package)
    if (package / manifest.FILE).exists():
        check(Artifact(package, Manifest.load(package)), hashes, progress, is_no_weight)


def check_package(package: Path, hashes: FileHashes, progress: Progress) -> None:
    """Hold all files against the manifest, and that against its signature; or all models against deployment.json.

    Raises:
        DamagedArtifact: With all that differ; or it is not signed, and $PIPELINE_VERIFY_KEY asks for it.
    """
    check_signature(package)
    if (package / manifest.FILE).exists():
        check(Artifact(package, Manifest.load(package)), hashes, progress)
        return
    with progress.task(f"verify {package.name}", unit="B") as task:

        def sha256(path: Path) -> str:
            with open_file(path) as stream:
                return hashes.sha256(stream, path, task.advance)

        digest, expected = (
            content_digest(package / REPOSITORY, sha256=sha256),
            Deployment.load(package).digest,
        )
    hashes.save()
    if digest != expected:
        raise DamagedArtifact(
            f"{package}: damaged\n"
            f"  {REPOSITORY}: its files have together the digest {digest}, and {FILE} says {expected}\n"
            "copy the package again; `pipeline store verify` tells whether the store's own is intact"
        )
