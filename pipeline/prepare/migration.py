"""A recipe for engines as one for the LLM API: what carries over, what changes and why, and the plan of both.

    migration = migrate(load_recipe("engines.yaml"), Path("engines-pytorch.yaml"), store)
    migration.text, migration.changes, migration.reports

What becomes of which setting is data (`contracts/data/migration.yaml`); values are those that both runtimes work out.
A format or a draft that the PyTorch backend lacks is exchanged or left out, as preflight judges the candidates. What
cannot be migrated at all is refused with everything that preflight says of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.contracts import gpus, llm_args
from pipeline.contracts import migration as contract
from pipeline.contracts.migration import documents
from pipeline.contracts.releases import container, half, require_runtime
from pipeline.contracts.rules import rule
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.plan.plan import DRAFT, TARGET
from pipeline.plan.preflight import Finding
from pipeline.prepare.facts import read_recipe_facts
from pipeline.prepare.initial_choices import newest_release
from pipeline.prepare.migration_changes import Change, client_changes, setting_changes, written
from pipeline.prepare.report import PlanReport, make_report
from pipeline.progress import Progress
from pipeline.recipe import Recipe, TensorRTRuntime
from pipeline.recipe.catalog import annotated_yaml, renamed_head, written_values
from pipeline.recipe.editing import edited_yaml
from pipeline.recipe.loading import recipe_of_values
from pipeline.recipe.recipe import Draft, RecipeProvenance
from pipeline.recipe.sections import RecipeValues
from pipeline.recipe.validators import AWQ
from pipeline.store import Store

_BLOCK, _CALIBRATION = "quantization.awq_block_size", "quantization.calibration"


@dataclass(frozen=True, slots=True)
class Migration:
    """A recipe of runtime tensorrt, and what was made of it.

    Attributes:
        text: YAML of `after`.
        keeps_comments: Whether `text` is that of the old file with changes in place.
        changes: Everything that differs, or that is said in another way.
        reports: Plans of both, before anything is made.
    """

    before: Recipe
    after: Recipe
    text: str
    keeps_comments: bool
    changes: tuple[Change, ...]
    reports: tuple[PlanReport, PlanReport]


def migrate(
    recipe: Recipe,
    file: Path,
    store: Store,
    *,
    version: str | None = None,
    progress: Progress | None = None,
) -> Migration:
    """Make a recipe for the LLM API from a recipe for engines; nothing is written.

    Args:
        version: Release of TensorRT-LLM; None: the newest stable one with a container that knows the GPU.

    Raises:
        UserError: The recipe is not for engines, or there is no such release.
        InvalidInput: Preflight refuses every possible result; the error lists all findings.
    """
    runtime = recipe.runtime
    if not isinstance(runtime, TensorRTRuntime):
        raise UserError(
            f"{recipe.name} has runtime.kind {runtime.kind}; pipeline migrate makes recipes of runtime.kind pytorch "
            "from those of runtime.kind tensorrt"
        )
    chosen = version or newest_release("pytorch", runtime.gpu)
    require_runtime(chosen, "pytorch")
    container(chosen)
    work = _MigratedValues(recipe, runtime, chosen, file)
    work.move("as asked for" if version else contract.note("version").because)
    work.give_up_drafts()
    work.choose_formats()
    after = work.recipe().read_from(RecipeProvenance(file.absolute()))
    stopping = work.objections()
    if stopping:
        faults = [
            Fault(finding.problem, key=finding.keys[0], fix=finding.fix, rule=finding.rule)
            for finding in stopping
        ]
        raise InvalidInput(f"{recipe.name} with TensorRT-LLM {chosen} and runtime pytorch", faults)
    changes = (
        *work.changes,
        *setting_changes(recipe, after, work.removed),
        *client_changes(recipe, chosen),
    )
    text, in_place = work.text()
    reports = (make_report(recipe, store, progress=progress), make_report(after, store, progress=progress))
    return Migration(recipe, after, text, in_place, changes, reports)


@dataclass
class _MigratedValues:
    """The values of a recipe in the making, and what was changed."""

    before: Recipe
    runtime: TensorRTRuntime
    version: str
    file: Path
    changes: list[Change] = field(default_factory=list)
    own: RecipeValues = field(init=False)
    values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        provenance = self.before.provenance
        whole = self.before.model_dump(mode="json")
        self.own = RecipeValues(whole)
        self.values = copy.deepcopy(
            written_values(provenance, provenance.overrides, whole, self.file.absolute().parent)
        )

    @property
    def removed(self) -> tuple[str, ...]:
        """Keys that are gone."""
        return tuple(change.key for change in self.changes if change.effect == "removed")

    def recipe(self, **changed: Any) -> Recipe:
        """The recipe as its values are now; `changed`: formats of weights by role."""
        return recipe_of_values(_with_formats(self.values, changed), (), str(self.file))

    def objections(self, **changed: Any) -> tuple[Finding, ...]:
        """Findings of preflight that stop it."""
        return tuple(
            finding for finding in read_recipe_facts(self.recipe(**changed)).findings() if finding.stops
        )

    # What changes whatever the recipe says

    def move(self, why: str) -> None:
        """Name the other runtime, and leave out what is of engines alone. `why`: reason for the release."""
        newest = contract.note("version")
        self._set("runtime.kind", "pytorch", half("tensorrt"), newest.sources)
        if self.version != self.runtime.version:
            driver = f"; its container needs driver {container(self.version).driver}"
            self._set("runtime.version", self.version, why + driver, newest.sources)
        for entry in self.runtime.build_flags:
            name, _, value = entry.partition("=")
            fact = contract.setting("flags", name)
            reason = fact.reason if fact else f"trtllm-build {self.runtime.version} has no such flag"
            sources = fact.sources if fact else newest.sources
            self._note_removal(f"runtime.build_flags[{name}]", value or True, reason, sources)
        _drop(self.values, ["runtime", "build_flags"])
        for key, note in contract.removed_keys().items():
            if self.own[key] not in (None, _default(key)):
                self._remove(key, note.because, note.sources)
        for fact in contract.settings():
            if fact.key is None or self.own[fact.key] in (None, _default(fact.key)):
                continue
            if fact.argument is not None and fact.argument_in(self.version) is None:
                reason = f"TensorRT-LLM {self.version} has no {fact.argument}"
                self._remove(fact.key, reason, fact.sources)
        if self.before.quantization.kv_cache == "fp8":
            note = contract.note("kv_scale")
            self._say("quantization.kv_cache", "fp8, calibrated scales", "fp8, a scale of 1", note)

    # Formats of weights

    def choose_formats(self) -> None:
        """Take other formats of weights where the PyTorch backend has not those of the recipe on its GPU."""
        for role, key in ((TARGET, "quantization.format"), (DRAFT, "draft.quantization")):
            form = RecipeValues(self.values)[key]
            missing = self._missing(form) if form not in (None, "none", "auto") else None
            if missing is None:
                continue
            possible = [other for other in self._instead(form) if not self.objections(**{role: other})]
            if possible:
                self._take_format(key, possible[0], *missing)

    def _missing(self, form: str) -> tuple[str, tuple[str, ...]] | None:
        """Why the PyTorch backend has not a format that engines have, and who says so; None if it has."""
        card, cache = gpus.gpu(self.runtime.gpu), self.before.quantization.kv_cache
        known = {issue.reason for issue in gpus.format_issues(card, form, cache, "tensorrt")}
        for issue in gpus.format_issues(card, form, cache, "pytorch", self.version):
            if issue.subject == "weights" and issue.reason not in known:
                return issue.reason, documents(issue.sources)
        return None

    def _instead(self, form: str) -> list[str]:
        """Formats instead of `form`, those that upstream lists for the GPU first."""
        card, formats = gpus.gpu(self.runtime.gpu), contract.other_formats(form)
        listed = [
            other for other in formats if not gpus.format_issues(card, other, "auto", "pytorch", self.version)
        ]
        return [*listed, *(other for other in formats if other not in listed)]

    def _take_format(self, key: str, form: str, reason: str, sources: tuple[str, ...]) -> None:
        self._set(key, form, reason, sources)
        self.values = _with_formats(self.values, {})
        for other in (_CALIBRATION, "quantization.gate", _BLOCK):
            if self.own[other] not in (None, _default(other)) and RecipeValues(self.values)[other] is None:
                self._note_removal(other, self.own[other], f"goes with the other {key}", sources)

    # Drafts

    def give_up_drafts(self) -> None:
        """Leave out the draft if the release cannot run it; say what running it costs otherwise."""
        draft = self.before.draft
        if draft is None:
            return
        findings = [finding for finding in self.objections() if rule(finding.rule).group == "speculation"]
        if findings:
            self._remove("draft", findings[0].problem, documents(findings[0].sources))
            # Its own calibration would be left over.
            self.values = _with_formats(self.values, {})
        elif llm_args.speculation(self.version, draft.method).two_models:
            self._say("runtime.overlap_scheduler", None, False, contract.note("two_models"))

    # Values and records

    def _set(self, key: str, value: Any, reason: str, sources: tuple[str, ...]) -> None:
        before = self.own[key]
        *path, name = key.split(".")
        section = self.values
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
        self.changes.append(Change("recipe", "changed", key, before, key, value, reason, sources))

    def _remove(self, key: str, reason: str, sources: tuple[str, ...]) -> None:
        self._note_removal(key, self.own[key], reason, sources)
        _drop(self.values, key.split("."))

    def _note_removal(self, key: str, value: Any, reason: str, sources: tuple[str, ...]) -> None:
        self.changes.append(Change("recipe", "removed", key, value, None, None, reason, sources))

    def _say(self, key: str, before: Any, after: Any, note: contract.MigrationNote) -> None:
        """Record what a key means from now on, which stays as it is."""
        self.changes.append(Change("recipe", "means", key, before, key, after, note.because, note.sources))

    # The file

    def text(self) -> tuple[str, bool]:
        """The YAML, and whether it is the old file's with changes in place."""
        comments = {"": self._head(), **self._comments()}
        file = self.before.provenance.file
        if file is not None:
            head = renamed_head(file.read_text(encoding="utf-8-sig"), file, self.file)
            first = next(iter(self.values))
            edited = edited_yaml(head, self.values, {first: comments.pop(""), **comments})
            if edited is not None:
                return edited, True
        return annotated_yaml([self._head()], self.values, self._comments()), False

    def _head(self) -> str:
        name = self.before.provenance.file.name if self.before.provenance.file else self.before.name
        return f"By pipeline migrate from {name} (runtime tensorrt, TensorRT-LLM {self.runtime.version})."

    def _comments(self) -> dict[str, str]:
        comments: dict[str, str] = {}
        for change in self.changes:
            if change.effect == "means":
                continue
            key = change.key.partition("[")[0]
            was = f"{change.key.rpartition('.')[2]} was {written(change.before)}"
            line = (
                f"{was}: {change.reason}"
                if change.effect == "changed"
                else f"without {change.key}: {change.reason}"
            )
            comments[key] = "; ".join(filter(None, (comments.get(key), line)))
        return comments


def _with_formats(values: Mapping[str, Any], formats: Mapping[str, str]) -> dict[str, Any]:
    """Values with other formats of weights by role, and without what then has no meaning."""
    changed = copy.deepcopy(dict(values))
    if TARGET in formats:
        changed.setdefault("quantization", {})["format"] = formats[TARGET]
    if DRAFT in formats:
        changed["draft"]["quantization"] = formats[DRAFT]
    quantization = changed.get("quantization", {})
    target = quantization.get("format", "none")
    drafted = (changed.get("draft") or {}).get("quantization", "none")
    if target == "none":
        _drop(changed, ["quantization", "gate"])
        if drafted == "none":
            _drop(changed, ["quantization", "calibration"])
    if target != "auto" and not {target, drafted} & set(AWQ):
        _drop(changed, _BLOCK.split("."))
    return changed


def _drop(values: dict[str, Any], path: Sequence[str]) -> None:
    """Remove a key, and the section around it if nothing is left in it."""
    name, *inner = path
    if not inner:
        values.pop(name, None)
    elif isinstance(values.get(name), dict) and inner[0] in values[name]:
        _drop(values[name], inner)
        if not values[name]:
            del values[name]


def _default(key: str) -> Any:
    """Default of a recipe's key that has a default."""
    section, _, name = key.partition(".")
    model = Draft if section == "draft" else Recipe.model_fields[section].annotation
    info = getattr(model, "model_fields", {}).get(name)
    return None if info is None or info.is_required() else info.default
