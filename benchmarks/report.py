"""All results on one page: benchmarks/results/report.html, which needs no other file.

    python benchmarks/report.py                         # takes a second, measures nothing

Reads every benchmarks/results/NAME.md, its NAME.json for the machine and the date, and NAME.png for
the picture, besides docs/scaling.png if it is there. Pictures are inside of the page.
"""

from __future__ import annotations

import base64
import html
import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, ROOT, arguments

TITLES = {
    "throughput": "Throughput beside its limits",
    "peers": "Throughput beside other libraries",
    "scaling": "From one rank to two",
    "lockstep": "What this machine takes from processes that wait for each other",
    "scaling_namespaces": "Ranks with a network between them",
    "comm": "Communication of one update",
    "compile": "Until the first update",
    "memory": "Peak memory",
    "profile": "Where the time of an iteration goes",
    "tuning": "What was changed for speed, and what did not help",
    "deterministic": "The cost of equal bits",
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
# Markdown: as much of it as the results use


def to_html(markdown: str) -> str:
    """Headings, tables, lists, code blocks and paragraphs."""
    lines, out = markdown.splitlines(), []
    while lines:
        if not lines[0].strip():
            lines.pop(0)
        elif lines[0].startswith("```"):
            out.append(code_block(take_code(lines)))
        elif lines[0].startswith("|"):
            out.append(table_html(take_while(lines, "|")))
        elif match := re.match(r"(#+) +(.*)", lines[0]):
            level = min(6, max(3, len(match[1])))  # h1 is the page, h2 the section
            out.append(f"<h{level}>{inline(match[2])}</h{level}>")
            lines.pop(0)
        elif lines[0].startswith("- "):
            items = "".join(f"<li>{inline(item)}</li>" for item in take_items(lines))
            out.append(f"<ul>{items}</ul>")
        else:
            out.append(f"<p>{inline(' '.join(take_paragraph(lines)))}</p>")
    return "\n".join(out)


def take_code(lines: list[str]) -> list[str]:
    lines.pop(0)
    taken = []
    while lines and not lines[0].startswith("```"):
        taken.append(lines.pop(0))
    if lines:
        lines.pop(0)
    return taken


def take_while(lines: list[str], start: str) -> list[str]:
    taken = []
    while lines and lines[0].startswith(start):
        taken.append(lines.pop(0))
    return taken


def take_items(lines: list[str]) -> list[str]:
    """A line that is indented belongs to the item before it."""
    items: list[str] = []
    while lines and lines[0].startswith(("- ", "  ")):
        line = lines.pop(0)
        if line.startswith("- "):
            items.append(line[2:])
        else:
            items[-1] += f" {line.strip()}"
    return items


def take_paragraph(lines: list[str]) -> list[str]:
    taken = [lines.pop(0).strip()]
    while lines and lines[0].strip() and not re.match(r"\||#+ |- |```", lines[0]):
        taken.append(lines.pop(0).strip())
    return taken


def code_block(lines: Sequence[str]) -> str:
    return f"<pre><code>{html.escape(chr(10).join(lines))}</code></pre>"


def inline(text: str) -> str:
    """Code first: what is inside of it stays as it is."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"<code>{html.escape(part[1:-1])}</code>"
        if len(part) > 2 and part.startswith("`")
        else marks(html.escape(part))
        for part in parts
    )


def marks(text: str) -> str:
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"(?<!\w)\*([^*\s][^*]*)\*(?!\w)", r"<em>\1</em>", text)
    return re.sub(r"\[([^\]]+)\]\((https?://[^)\s]+)\)", r'<a href="\2">\1</a>', text)


def table_html(lines: Sequence[str]) -> str:
    header, *rows = [cells(line) for line in lines]
    rows = [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    right = [numeric([row[i] for row in rows if i < len(row)]) for i in range(len(header))]

    def row_html(row: Sequence[str], tag: str) -> str:
        inside = []
        for i, cell in enumerate(row):
            number = ' class="number"' if i < len(right) and right[i] else ""
            inside.append(f"<{tag}{number}>{inline(cell)}</{tag}>")
        return f"<tr>{''.join(inside)}</tr>"

    head, body = row_html(header, "th"), "\n".join(row_html(row, "td") for row in rows)
    inside = f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="table"><table>\n{inside}\n</table></div>'


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def numeric(column: Sequence[str]) -> bool:
    """Whether a column holds numbers, here and there with a dash for a missing one."""
    filled = [cell for cell in column if cell not in ("", "–", "-")]
    return bool(filled) and all(re.match(r"[+-]?\d[\d,.]*\s*(%|$|\()", cell) for cell in filled)


# ---------------------------------------------------------------------------------------------
# The page

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #59636e; --line: #d8dee4;
  --paper: #ffffff; --tint: #f4f6f8; --link: #0757b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe5ea; --soft: #98a3ad; --line: #343b42;
  --paper: #15191d; --tint: #1d2227; --link: #79b4ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.9rem; margin: 0 0 .25rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .25rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .25rem; }
p, li { max-width: 46rem; }
a { color: var(--link); }
.about { color: var(--soft); font-size: .85rem; margin: .25rem 0 1rem; }
nav ul { columns: 2 18rem; padding-left: 1.2rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .75rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { background: var(--tint); font-weight: 600; vertical-align: bottom; }
.number { text-align: right; }
td.number { white-space: nowrap; }
code { background: var(--tint); border-radius: 4px; padding: .1em .3em; font-size: .9em; }
pre { background: var(--tint); border-radius: 8px; padding: 1rem; overflow-x: auto; }
pre code { background: none; padding: 0; }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; padding: .5rem;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; }
"""


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
<style>{STYLE}</style>
</head>
<body>
<h1>spmdrl: benchmarks</h1>
<p class="about">Put together {made} by <code>python benchmarks/report.py</code> from the files in
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
