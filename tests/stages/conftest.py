"""What the tests of the stages share."""

from __future__ import annotations

import pytest

from tests.support.calibrated import Calibrations


@pytest.fixture(scope="session")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> Calibrations:
    return Calibrations(tmp_path_factory.mktemp("calibrations"))
