"""A hook of the site: what docs/ links to outside itself becomes pages of the site.

README.md and benchmarks/README.md are pages; any other file of the repository is shown as a listing. Links between them
are rewritten, so the same Markdown reads right in a checkout and on the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "about.md", "benchmarks/README.md": "benchmarks.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown"}
_LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def site_path(repository_path: str) -> str:
    """Where the site has a file of the repository, as a path of its sources."""
    if repository_path in PAGES:
        return PAGES[repository_path]
    if repository_path.startswith("docs/"):
        return repository_path.removeprefix("docs/")
    return f"files/{repository_path}.md"


def relinked(markdown: str, repository_path: str) -> tuple[str, set[str]]:
    """The Markdown of a file with its links as the site needs them, and which files of the repository it links to."""
    here, there = posixpath.dirname(repository_path), posixpath.dirname(site_path(repository_path))
    linked: set[str] = set()

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[1]))
        linked.add(target)
        return f"]({posixpath.relpath(site_path(target), there or '.')}{link[2] or ''})"

    return _LINK.sub(rewrite, markdown), linked


def _listing(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(Path(path).suffix, "")
    return f"# {posixpath.basename(path)}\n\n`{path}` of the repository.\n\n````{language}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    wanted: set[str] = set(PAGES)
    for source in [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]:
        wanted |= relinked((ROOT / source).read_text(encoding="utf-8"), source)[1]
    for path in sorted(wanted):
        if path.startswith("docs/") or not (ROOT / path).is_file():  # what is missing is left for mkdocs to complain of
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        content = relinked(text, path)[0] if path in PAGES else _listing(path)
        shown = InclusionLevel.INCLUDED if path in PAGES else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, site_path(path), content=content, inclusion=shown))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of the pages that are in docs/."""
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{page.file.src_uri}")[0]
