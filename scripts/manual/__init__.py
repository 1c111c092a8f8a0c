"""Pages of the manual that are written from the code each time it is built, so that they cannot disagree with it.

`hooks` is what mkdocs calls; every other module returns the Markdown (or SVG) of one subject.
"""
