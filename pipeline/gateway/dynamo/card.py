"""The folder by which Dynamo registers a model: the tokenizer's files of the package, and a config.json.

Packages hold no config.json. Dynamo 1.6.1 reads the end tokens and the longest context from it, and requires
`architectures` and `model_type` (lib/llm/src/model_card.rs). Its frontend refuses workers of one model whose folders
have different paths, so the path follows from the package alone.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.triton.deployment import Deployment


def make_model_card(package: Path, deployment: Deployment) -> Path:
    """Make the folder, below $TMPDIR, or take it over from another worker of this user.

    Raises:
        UserError: it belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"pipeline-dynamo-{deployment.name}-{deployment.digest[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user: remove it, or set TMPDIR")
    # Other workers may read the files meanwhile.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as draft:
        for file in (package / deployment.tokenizer_dir).iterdir():
            shutil.copyfile(file, Path(draft) / file.name)
        text = json.dumps(model_config(deployment), indent=2) + "\n"
        (Path(draft) / "config.json").write_text(text, encoding="utf-8")
        for file in Path(draft).iterdir():
            file.replace(folder / file.name)
    return folder


def model_config(deployment: Deployment) -> dict[str, Any]:
    """Make the config.json of a package."""
    limits = deployment.limits
    return {
        "architectures": ["TritonPackage"],
        "model_type": f"pipeline-{deployment.runtime}",
        "eos_token_id": [deployment.end_id, *deployment.stop_token_ids],
        "max_position_embeddings": limits.max_input_tokens + limits.max_output_tokens,
    }
