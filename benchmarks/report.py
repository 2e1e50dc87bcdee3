"""All results on one page: benchmarks/results/report.html, which needs no other file.

    python -m benchmarks.report                         # takes a second, measures nothing

Reads every benchmarks/results/NAME.md, its NAME.json for the machine and the date, and NAME.png for
the picture, besides docs/scaling.png if it is there. Pictures are part of the page. It is not
committed: make it when you want to read it.
"""

from __future__ import annotations

import base64
import html
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from benchmarks.lib.common import RESULTS, ROOT, arguments

TITLES = {
    "throughput": "Throughput beside its limits",
    "peers": "Throughput beside other libraries",
    "scaling": "From one rank to two",
    "lockstep": "What this machine takes from processes that wait for each other",
    "scaling_namespaces": "Ranks with a network between them",
    "comm": "Communication of one update",
    "compile": "Until the first update",
    "memory": "Peak memory",
    "parts": "Where the time of an iteration goes",
    "tuning": "What was changed for speed, and what did not help",
    "deterministic": "The cost of equal bits",
    "old_new": "Two versions of the trainer in turns",
    "overlap": "Collecting while learning",
    "checkpointing": "The cost of checkpoints",
    "faults": "When a rank breaks",
    "kills": "Killed and resumed",
    "stops": "Stopped on request",
}
PICTURES = {"scaling": [ROOT / "docs" / "scaling.png"]}  # besides the one of the same name


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    markdown: str
    about: str  # when and on what
    pictures: tuple[Path, ...]


# ---------------------------------------------------------------------------------------------
# Reading


def sections(folder: Path) -> list[Section]:
    """Those with a title in its order, then all others by name."""
    names = [file.stem for file in sorted(folder.glob("*.md"))]
    known = [name for name in TITLES if name in names]
    return [section(folder, name) for name in [*known, *(n for n in names if n not in TITLES)]]


def section(folder: Path, name: str) -> Section:
    text = (folder / f"{name}.md").read_text()
    own = folder / f"{name}.png"
    pictures = tuple(p for p in [own, *PICTURES.get(name, [])] if p.exists())
    title = TITLES.get(name, name.replace("_", " ").capitalize())
    return Section(name, title, text, about(folder, name), pictures)


def about(folder: Path, name: str) -> str:
    """From what the benchmark wrote down; where it did not, from the history of the file."""
    data = folder / f"{name}.json"
    content = json.loads(data.read_text()) if data.exists() else {}
    found = machine_of(content)
    when = found.get("when") or committed(folder / f"{name}.md")
    parts = [f"Measured {found['when']}" if "when" in found else f"Last changed {when}"]
    if not found:
        return f"{parts[0]}; the machine was not recorded apart from the text."
    parts.append(f"{found['cpu']}, {found['cores']} cores, {found['system']}")
    parts.append(f"load average {found['load_average']:.1f} at the start")
    parts.append(", ".join(f"{k} {v}" for k, v in found["versions"].items()))
    return "; ".join(parts) + "."


def machine_of(content: Any) -> dict[str, Any]:
    """Of the whole file, or of its first case where the run was interrupted."""
    if not isinstance(content, dict):
        return {}
    if "machine" in content:
        return content["machine"]
    return next((c["machine"] for c in content.get("cases", {}).values() if "machine" in c), {})


def committed(file: Path) -> str:
    command = ["git", "log", "-1", "--format=%cs", "--", file.name]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    return done.stdout.strip() or time.strftime("%Y-%m-%d", time.localtime(file.stat().st_mtime))


# ---------------------------------------------------------------------------------------------
# The page

STYLE = Path(__file__).with_name("lib") / "report.css"
TOP_LEVEL = 3  # of a section's own headings: h1 is the page, h2 the section


def to_html(markdown: str) -> str:
    """By the rules of CommonMark, with tables; HTML in the text is shown, not obeyed."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{max(TOP_LEVEL, int(token.tag[1:]))}"
    return parser.renderer.render(tokens, parser.options, {})


def picture(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def page(found: Sequence[Section]) -> str:
    contents = "\n".join(f'<li><a href="#{s.name}">{html.escape(s.title)}</a></li>' for s in found)
    body = "\n".join(section_html(s) for s in found)
    made = time.strftime("%Y-%m-%d")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>spmdrl: benchmarks</title>
<style>{STYLE.read_text()}</style>
</head>
<body>
<h1>spmdrl: benchmarks</h1>
<p class="about">Put together {made} by <code>python -m benchmarks.report</code> from the files in
<code>benchmarks/results</code>. Each section says when and on what it was measured.</p>
<nav aria-label="Contents">
<ul>
{contents}
</ul>
</nav>
<main>
{body}
</main>
</body>
</html>
"""


def section_html(found: Section) -> str:
    pictures = "\n".join(picture(path, found.title) for path in found.pictures)
    return (
        f'<section id="{found.name}">\n<h2>{html.escape(found.title)}</h2>\n'
        f'<p class="about">{html.escape(found.about)}</p>\n{pictures}\n{to_html(found.markdown)}\n'
        "</section>"
    )


def main() -> None:
    arguments(__doc__).parse_args()
    found = sections(RESULTS)
    out = RESULTS / "report.html"
    out.write_text(page(found))
    size = out.stat().st_size / 1e6
    print(f"{len(found)} sections, {size:.1f} MB, written to {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
