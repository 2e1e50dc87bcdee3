"""For MkDocs: the site has the files of the project under the paths that they have there.

So the same relative links work on the site, on a code host and on a disk, also those that leave
docs/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "docs/*.md",
    "docs/*.png", "docs/*.svg", "benchmarks/README.md", "benchmarks/results/*.md",
    "benchmarks/results/*.png", "slurm/*.sbatch", "tests/a2c.py",
)  # fmt: skip


def on_files(files: Files, config: Any) -> Files:
    """In the place of what MkDocs has found in docs/; those of the theme stay."""
    theirs = [file for file in files if file.abs_src_path is None or not _is_ours(file)]
    paths = sorted(path for pattern in SHOWN for path in ROOT.glob(pattern))
    ours = [
        File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        for path in paths
    ]
    return Files([*theirs, *ours])


def _is_ours(file: File) -> bool:
    return Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")
