"""Optional parts of the distribution: the command that installs one, and the error that names it where it is missing.

On the package index `pipeline` is another project; this one is distributed as `trtllm-pipeline`.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline import resources
from pipeline.errors import UserError

DISTRIBUTION = "trtllm-pipeline"


def install_line(*extras: str) -> str:
    """Return the command that installs extras into the environment of this interpreter, from where this copy came.

    Args:
        extras: names as in pyproject.toml; without any, the line installs what every part needs.

    >>> install_line("hub", "cpu").endswith("[hub,cpu]'") or "[hub,cpu] @ " in install_line("hub", "cpu")
    True
    """
    suffix = f"[{','.join(extras)}]" if extras else ""
    checkout = resources.checkout()
    if checkout is not None:
        return f"pip install --editable '{checkout}{suffix}'"
    origin = _origin()
    return f"pip install '{DISTRIBUTION}{suffix}{f' @ {origin}' if origin else ''}'"


def missing(feature: str, error: ImportError, *extras: str) -> UserError:
    """Make the error for a part whose packages are not installed.

    Args:
        feature: the part that needs them, such as "the Hub".
        error: error of the import.
        extras: names as in pyproject.toml that bring them.
    """
    return UserError(f"{feature} needs {error.name or error}: {install_line(*extras)}")


def _origin() -> str:
    """The address of the wheel or repository that this was installed from (PEP 610).

    Empty if it came from a package index, or from a file that is gone.
    """
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    recorded = json.loads(text) if text else {}
    url: str = recorded.get("url", "")
    if repository := recorded.get("vcs_info"):
        return f"{repository['vcs']}+{url}@{repository['commit_id']}"
    parts = urlsplit(url)
    return "" if parts.scheme == "file" and not Path(unquote(parts.path)).exists() else url
