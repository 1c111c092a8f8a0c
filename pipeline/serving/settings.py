"""Settings of the exchange of a served package. Light to import, for help and completion of verbs."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeline.settings import Option, Settings


class ExchangeSettings(Settings):
    """Way in which a package is exchanged, for `pipeline rollout` and `pipeline rollback`."""

    skip_golden: bool = Field(default=False, description="Do not ask the package's golden questions.")
    in_place: bool = Field(
        default=False,
        description="End the old Triton first, for two that do not fit in memory. Requests wait meanwhile.",
    )
    drain_s: Annotated[float, Option(metavar="SECONDS")] = Field(
        default=120.0,
        ge=0,
        description="Time for requests that the old package has under way; then they are cut off.",
    )
