"""Pages whose blocks of Python are files: `# name.py` in their first line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

__all__ = ["python_blocks", "written"]


def python_blocks(text: str) -> dict[str, str]:
    """The files of a page, by name."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL))


def written(blocks: Mapping[str, str], folder: Path) -> Path:
    """The folder, with the files in it."""
    folder.mkdir(exist_ok=True)
    for name, text in blocks.items():
        (folder / name).write_text(text)
    return folder
