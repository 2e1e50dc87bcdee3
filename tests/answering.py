"""A child process that does what it is asked to; see tests/test_env_sheet.py."""

import os
import sys
import time

from spmdrl.config import ConfigError
from spmdrl.envs.child import serve


def answer(wanted: dict) -> dict:
    print("not an answer", sys.stdin.read(), flush=True)
    if "refuse" in wanted:
        raise ConfigError(wanted["refuse"])
    if "raise" in wanted:
        raise ValueError(wanted["raise"])
    if "exit" in wanted:
        print("last words", file=sys.stderr, flush=True)
        os._exit(wanted["exit"])
    if "kill" in wanted:
        os.kill(os.getpid(), wanted["kill"])
    if "sleep" in wanted:
        time.sleep(wanted["sleep"])
    return {"said": wanted["say"]}


if __name__ == "__main__":
    sys.exit(serve(answer))
