"""The front drawn: in a terminal, as a page of its own, or as a picture. All take a `Comparison`.

To the right are slower tokens, upwards is more that a million of them take; both axes are logarithmic. Lower left is
best.
"""

from pipeline.plan.performance.plots.page import front_page
from pipeline.plan.performance.plots.picture import front_picture
from pipeline.plan.performance.plots.terminal import front_lines

__all__ = ["front_lines", "front_page", "front_picture"]
