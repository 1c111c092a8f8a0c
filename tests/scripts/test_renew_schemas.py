"""The schemas that manifests are held against are what the script makes of files as upstream publishes them."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
_NOISE = {
    "description": "what it is",
    "default": 1,
    "format": "int32",
    "x-kubernetes-validations": [{"rule": "self.size() > 0"}],
}


def published(schema: Any) -> Any:
    """A schema with all that the script cuts off."""
    if isinstance(schema, list):
        return [published(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        # A property may have the name of a keyword.
        key: {name: published(part) for name, part in [*value.items(), ("description", {"type": "string"})]}
        if key == "properties"
        else published(value)
        for key, value in schema.items()
    }
    return made | _NOISE if "type" in made or "properties" in made else made


def without_added(schema: Any) -> Any:
    """The properties that `published` has added are no noise, and stay."""
    if isinstance(schema, list):
        return [without_added(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: without_added(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict):
        assert found["properties"].pop("description") == {"type": "string"}
    return found


def test_what_is_checked_in_is_what_the_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SourceFileLoader("renew_schemas", str(ROOT / "scripts" / "renew_schemas"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    script = module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(script)
    for name in ("CRDS", "COMPOSE"):
        copied = Path(shutil.copy(getattr(script, name), tmp_path / getattr(script, name).name))
        monkeypatch.setattr(script, name, copied)
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    known = yaml.safe_load(script.CRDS.read_text(encoding="utf-8"))
    for kind, part in known.items():
        version = {"name": part["apiVersion"].rpartition("/")[2]}
        version["schema"] = {
            "openAPIV3Schema": {"properties": {"spec": published(part["spec"]), "status": {}}}
        }
        for path in part.get("without", ()):
            *outer, last = path.split(".")
            schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
            for name in outer:
                schema = schema["properties"][name]
                schema = schema.get("items", schema)
            schema["properties"][last] = {"type": "object", "properties": {"secret": {"type": "string"}}}
        document = {"spec": {"versions": [{"name": "v1alpha0"}, version]}}
        text = "{{- if .Values.crds.install }}\n" + yaml.safe_dump(document) + "{{- end }}\n"
        (upstream / f"{kind}.yaml").write_text(text, encoding="utf-8")
    schema = json.loads(script.COMPOSE.read_text(encoding="utf-8"))
    (upstream / script.COMPOSE.name).write_text(json.dumps(schema | {"description": "x"}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["renew_schemas", str(upstream)])
    script.main()
    made = yaml.safe_load(script.CRDS.read_text(encoding="utf-8"))
    assert {kind: part | {"spec": without_added(part["spec"])} for kind, part in made.items()} == known
    assert script.COMPOSE.read_bytes() == (ROOT / "tests" / "deploy" / "compose-spec.json").read_bytes()
