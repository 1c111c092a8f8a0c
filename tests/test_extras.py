"""What a hint tells people to type installs this project, and not another that is called `pipeline`."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from pipeline import extras, resources
from pipeline.extras import DISTRIBUTION, install_line, missing

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: object = None) -> None:
    """A wheel in place of this checkout; `direct_url`: what pip wrote down of where it came from."""
    folder = tmp_path / "trtllm_pipeline-0.1.0.dist-info"
    folder.mkdir()
    if direct_url:
        (folder / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.setattr(resources, "checkout", lambda: None)
    monkeypatch.setattr(metadata, "distribution", lambda _: metadata.Distribution.at(folder))


def test_the_distribution_is_that_of_the_project() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert metadata.distribution(DISTRIBUTION).version == PROJECT["version"]


def test_a_checkout_is_installed_from_where_it_is() -> None:
    assert install_line("hub", "cpu") == f"pip install --editable '{ROOT}[hub,cpu]'"
    assert install_line() == f"pip install --editable '{ROOT}'"


def test_a_wheel_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    assert install_line("hub") == "pip install 'trtllm-pipeline[hub]'"


def test_a_wheel_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "a folder" / "trtllm_pipeline-0.1.0-py3-none-any.whl"
    installed(tmp_path, monkeypatch, {"url": wheel.as_uri(), "archive_info": {}})
    assert install_line("hub") == "pip install 'trtllm-pipeline[hub]'", "the file is gone"
    wheel.parent.mkdir()
    wheel.touch()
    assert install_line("hub") == f"pip install 'trtllm-pipeline[hub] @ {wheel.as_uri()}'"


def test_a_commit_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"url": "https://example.org/p.git", "vcs_info": {"vcs": "git", "commit_id": "a1b2"}}
    installed(tmp_path, monkeypatch, told)
    assert install_line("hub") == "pip install 'trtllm-pipeline[hub] @ git+https://example.org/p.git@a1b2'"


def test_every_hint_names_an_extra_of_the_project() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pipeline").rglob("*.py"))
    named = re.findall(r"""(?:install_line\(|missing\([^"]*f?"[^"]*", error, )["'](\w+)["']""", text)
    assert len(named) > 10
    assert set(named) <= set(PROJECT["optional-dependencies"])
    assert not re.findall(r"pip install\s+['\"]?pipeline\b", text)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        import nonesuch.part  # type: ignore[import-not-found]  # noqa: F401
    error = missing("the Hub", caught.value, "hub")
    assert str(error) == f"the Hub needs nonesuch: {extras.install_line('hub')}"
    assert error.exit_code == 2
