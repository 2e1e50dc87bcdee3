"""Run directory in, returns and video out: `python -m spmdrl.evaluate RUN_DIR`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.cli import answer_errors
from spmdrl.config import Config, ConfigError
from spmdrl.options import PlayOptions, RunPath, given_words, parse
from spmdrl.runtime.consent import bring_code
from spmdrl.runtime.evaluation import EVAL_FILE, play, spread, summarize, write_result
from spmdrl.runtime.models import find_checkpoint
from spmdrl.runtime.provenance import read_code
from spmdrl.runtime.rundir import read_run
from spmdrl.runtime.validate import validate
from spmdrl.runtime.video import Video, check_video_file, open_video

__all__ = ["main"]

RENAMED = {
    "--best": "--checkpoint best",
    "--no-best": "--checkpoint latest",
    "--no-deterministic": "--stochastic",
}


@dataclass(frozen=True, kw_only=True)
class Options(PlayOptions):
    """Play episodes with a trained policy.

    Prints mean and deviation of the return with a 95 % interval, and writes them with the return of
    every episode to eval.json in the run directory. Without --deterministic or --stochastic actions
    are chosen as the run's eval.deterministic says.
    """

    run_dir: RunPath
    """Run directory of a training run."""
    episodes: int | None = None
    """Episodes to play; by default the config's eval.episodes."""
    seed: int | None = None
    """Seed of the environments; by default the config's eval.seed."""
    num_envs: int | None = None
    """Environments played at the same time; by default the config's eval.num_envs."""
    video: str | None = None
    """Also write the first episode to this file, which must end in .gif or .mp4."""


def eval_config(options: Options) -> Config:
    """The run's config with the evaluation's own environments."""
    config = read_run(options.run_dir)
    named = ("episodes", "seed", "num_envs")
    given = {n: getattr(options, n) for n in named if getattr(options, n) is not None}
    given["deterministic"] = options.takes_the_mode(otherwise=config.eval.deterministic)
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, **given))
    validate(config)
    return config


def check_renders(config: Config) -> None:
    """Families that draw without a display; the others would end the process."""
    if config.env.backend == "envpool":
        from spmdrl.envs.ids import envpool_families

        family = envpool_families()[config.env.id]
        headless = ("atari", "classic_control", "box2d", "minigrid", "highway", "toy_text")
        if not family.endswith(headless):
            raise ConfigError(
                f"--video: {config.env.id} ({family}) cannot be drawn without a display; "
                f"these families can: {', '.join(headless)}"
            )


def report(config: Config, checkpoint: Path, result: dict[str, Any]) -> str:
    interval = result["return_ci95"]
    shown = f", 95 % interval {interval[0]:.1f} to {interval[1]:.1f}" if interval else ""
    return (
        f"{config.env.id}, {checkpoint.name}: {spread(result)}{shown}, "
        f"length {result['length_mean']:.0f}"
    )


@answer_errors(os_errors=True)
def main(argv: Sequence[str] | None = None) -> int:
    words = given_words(argv)
    options = parse(Options, "evaluate", words, RENAMED)
    config, run_dir = eval_config(options), Path(options.run_dir)
    checkpoint = find_checkpoint(run_dir, options.checkpoint)
    bring_code(config, read_code(run_dir), run_dir, options.consent("evaluate", words))
    frames: Video | None = None
    if options.video:
        check_video_file(options.video)
        check_renders(config)
        frames = open_video(options.video)
    print(f"playing {config.eval.episodes} episodes with {checkpoint.name}", flush=True)
    result = summarize(play(config, checkpoint, frames), config, checkpoint)
    write_result(run_dir, result)
    print(report(config, checkpoint, result))
    written = [str(run_dir / EVAL_FILE)]
    if frames is not None and options.video:
        note = frames.close()
        written.append(options.video)
        if note:
            print(note)
    print(f"written to {' and '.join(written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
