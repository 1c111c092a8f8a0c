"""Figures of matplotlib as `<svg>` elements of a page: they load nothing, and follow its light or dark colors."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree

SVG = "http://www.w3.org/2000/svg"
# The color of text, axes and grids while a figure is drawn; in the page it is the color of the text around it.
INK = "#1b1f24"
_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
_REFERENCE = re.compile(r"#(?=[\w-]+\)?$)")


def has_matplotlib() -> bool:
    """Whether figures can be drawn: matplotlib comes with the extras `plot` and `bench`."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def inline_svg(
    draw: Callable[[], Any],
    name: str,
    alt: str,
    *,
    colors: Mapping[str, str] | None = None,
    look: Mapping[str, Any] | None = None,
) -> ElementTree.Element:
    """Draw a figure as an `<svg>` element without a background.

    Args:
        draw: Makes the `matplotlib.figure.Figure`.
        name: Begins all ids, so that two figures of a page share none.
        alt: Says what a person would see.
        colors: Color in the figure (#rrggbb) -> what stands for it in the page, such as `var(--accent)`.
        look: matplotlib's settings (rcParams) while it is drawn.

    Returns:
        The element, to be changed further or written by `svg_text`.
    """
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        **dict.fromkeys(_INKED, INK),
        **(look or {}),
    }
    file = io.BytesIO()
    with matplotlib.rc_context(settings):
        draw().savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    root.set("role", "img")
    root.set("aria-label", alt)
    replaced = {INK: "currentColor", **(colors or {})}
    for element in root.iter():
        for key, value in element.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == "style":
                for color, in_page in replaced.items():
                    value = value.replace(color, in_page)
                element.set(key, value)
            elif "#" in value:
                element.set(key, _REFERENCE.sub(f"#{name}-", value))
    return root


def svg_text(root: ElementTree.Element) -> str:
    """Write an element of `inline_svg` for a page."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")
