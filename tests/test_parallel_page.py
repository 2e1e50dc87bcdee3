"""docs/parallel.md, word for word, and what happens when a rank of such a script fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.parallel.spawn import mpirun_command
from tests.children import ROOT

PAGE = ROOT / "docs" / "parallel.md"


def mpirun(script: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    return subprocess.run(
        [*mpirun_command(ranks), sys.executable, str(script)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_script_of_the_page_keeps_the_ranks_equal(tmp_path):
    code = re.search(r"```python\n(import jax.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "script.py"
    show = "print('end', api.rank(), api.size(), np.asarray(params['w']).tobytes().hex())\n"
    script.write_text(code[1] + show)
    done = mpirun(script, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[rank 1/2] step 40: return" in done.stderr
    ends = sorted(re.findall(r"end (\d) (\d) (\w+)", done.stdout))
    assert [(rank, size) for rank, size, _ in ends] == [("0", "2"), ("1", "2")]
    assert ends[0][2] == ends[1][2]
    assert set(ends[0][2]) != {"0"}


def test_exception_on_one_rank_ends_the_others(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np\n"
        "from spmdrl import api\n"
        "if api.rank() == 1:\n"
        "    raise KeyError('lost')\n"
        "api.allmean({'a': np.ones(3, np.float32)})\n"
    )
    done = mpirun(script, 2)  # rank 0 would wait for ever
    assert done.returncode != 0
    assert "[rank 1/2] failed with KeyError: 'lost'" in done.stderr
    assert "Traceback" in done.stderr
