"""A Dockerfile, taken apart: stages and their instructions. Enough for ours; no shell is understood."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """One line, continuations joined: RUN, "python3 …"."""

    name: str
    rest: str

    @property
    def flags(self) -> list[str]:
        """--from=…, --mount=… and the like, before the arguments."""
        return re.match(r"((?:--\S+\s+)*)", self.rest + " ")[1].split()  # type: ignore[index]

    @property
    def arguments(self) -> list[str]:
        """What is not a flag."""
        return self.rest.split()[len(self.flags) :]


@dataclass
class Stage:
    """From one FROM to the next."""

    name: str
    image: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]


@dataclass
class Dockerfile:
    """All of it."""

    arguments: dict[str, str]  # ARGs before the first stage
    stages: list[Stage]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def parse(text: str) -> Dockerfile:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = Dockerfile({}, [])
    for line in joined:
        name, _, rest = line.strip().partition(" ")
        instruction = Instruction(name, rest.strip())
        assert name == name.upper(), line
        if name == "FROM":
            image, _, stage = instruction.rest.partition(" AS ")
            found.stages.append(Stage(stage, image))
        elif not found.stages:
            assert name == "ARG", f"{name} before FROM"
            key, _, value = rest.partition("=")
            found.arguments[key] = value
        else:
            found.stages[-1].instructions.append(instruction)
    return found
