"""The pages as a site: every link leads somewhere, and nothing is fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.children import ROOT, clean_environment

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


class Fetches(HTMLParser):
    """What a browser would load by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        loads = tag in ("script", "img", "iframe") or (
            tag == "link" and known.get("rel") not in ("canonical", "prev", "next")
        )
        self.found += [known.get("src") or known.get("href") or ""] if loads else []


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        build, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_the_site_builds_with_every_link_and_anchor(site):
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert {"index.html", "docs/faq.html", "docs/reference.html", "docs/slurm.html"} <= pages
    assert (site / "docs" / "concepts.svg").is_file()
    assert (site / "tests" / "a2c.py").is_file()
    assert "own_network" in (site / "search" / "search_index.json").read_text()


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        reader = Fetches()
        reader.feed(page.read_text())
        assert not [where for where in reader.found if "//" in where], page
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert not re.search(r"url\([\"']?(https?:)?//", styles)


def test_every_page_is_reached_from_the_readme():
    """On a code host there is no menu."""
    seen, new = set(), [ROOT / "README.md"]
    while new:
        page = new.pop()
        seen.add(page)
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file() and target not in seen:
                new.append(target)
    assert set((ROOT / "docs").glob("*.md")) <= seen


def anchors(page: Path) -> set[str]:
    """As code hosts make them of headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere_on_a_code_host_too():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in LINK.findall(page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "//" not in link:
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_the_menu_has_every_page():
    menu = re.sub(r"^ *#.*$", "", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in menu]
    assert not missing, f"add to nav in mkdocs.yml: {missing}"
