"""Hooks of mkdocs: add the generated pages, and those that lie at the root of the repository.

Configured in mkdocs.yml, written against mkdocs 1.6.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from manual import (  # noqa: E402
    access_log,
    environment,
    errors,
    fleet,
    house,
    loads,
    metrics,
    migration,
    parameters,
    recipe,
    rules,
    tables,
)

PAGES: dict[str, Callable[[], str]] = {
    "reference/recipe.md": recipe.page,
    "reference/recipes.md": tables.packaged_recipes,
    "reference/releases.md": tables.releases_and_gpus,
    "reference/rules.md": rules.page,
    "reference/metrics.md": metrics.page,
    "reference/access-log.md": access_log.page,
    "reference/errors.md": errors.page,
    "reference/environment.md": environment.page,
    "reference/loads.md": loads.page,
    "explanation/house.svg": house.drawing,
}
TABLES: dict[str, Callable[[], str]] = {
    "<!-- rooms -->": house.table,
    "<!-- parameters -->": parameters.table,
    "<!-- fleet day -->": fleet.day,
    "<!-- engine settings -->": migration.table,
}
# Files of the repository's root that are pages, too.
ROOT_PAGES = {
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for path, name in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        # Links of the root go to docs/…; here the page lies beside what they name.
        text = re.sub(r"\]\(docs/", "](", text)
        for page, source in ROOT_PAGES.items():
            text = text.replace(f"]({source})", f"]({page})")
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Put generated tables where a page asks for them."""
    for marker, table in TABLES.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Show the examples of a command's help line by line; mkdocs-click makes a paragraph of them."""
    if page.file.src_uri != "reference/cli.md":
        return html
    return re.sub(r"<p>((?:pipeline|curl|tenants:) ?[^<]*)</p>", r"<pre><code>\1</code></pre>", html)
