"""The documentation as a site: everything it links to is there, and nothing of it comes from a network."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from cli_process import REPO

pytestmark = pytest.mark.skipif(
    find_spec("material") is None, reason="mkdocs-material is not installed: pip install 'g2sim[docs]'"
)


class _Page(HTMLParser):
    """What a page loads, where it leads, and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "src" in given:
            self.loads.append(given["src"])
        if "href" in given:
            (self.leads if tag == "a" else self.loads).append(given["href"])
        if "id" in given:
            self.places.add(given["id"])


def test_the_site_is_whole_and_asks_no_network(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html")}
    pages.pop(tmp_path / "404.html")  # its links count from the root of a server
    assert len(pages) > 50
    for path, page in pages.items():
        assert not [url for url in page.loads if urlsplit(url).scheme not in ("", "data")], path
        for url in [*page.loads, *page.leads]:
            parts = urlsplit(url)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name}: {url} leads nowhere"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].places, f"{path.name}: {url}: no such place"
