"""Run directory in, returns and video out: `python -m spmdrl.evaluate RUN_DIR`.

Public names: `play`, `main`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import EXIT_BAD_INPUT, Config, ConfigError
from spmdrl.runtime.play import find_checkpoint, load_model, make_chooser, play_steps
from spmdrl.runtime.rundir import read_run
from spmdrl.runtime.validate import validate


@dataclass(frozen=True)
class Options:
    """Play episodes with a trained policy."""

    run_dir: str
    """Run directory of a training run."""
    episodes: int | None = None
    """Episodes to play; by default the config's eval.episodes."""
    deterministic: bool | None = None
    """Take the most likely action, or sample; by default the config's eval.deterministic."""
    seed: int | None = None
    """Seed of the environments; by default the config's eval.seed."""
    num_envs: int | None = None
    """Environments played at the same time; by default the config's eval.num_envs."""
    checkpoint: int | None = None
    """Update whose checkpoint is played; by default the newest."""
    best: bool = False
    """Play the checkpoint with the best training return instead of the newest."""
    video: str | None = None
    """Also write the first episode as a GIF."""


def eval_config(options: Options) -> Config:
    """The run's config with the evaluation's own environments."""
    config = read_run(options.run_dir)
    named = ("episodes", "deterministic", "seed", "num_envs")
    given = {n: getattr(options, n) for n in named if getattr(options, n) is not None}
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, **given))
    validate(config)
    return config


def play(
    config: Config, checkpoint: Path, frames: list[Any] | None = None
) -> list[tuple[float, int]]:
    """`(return, length)` of the evaluation's episodes.

    Every environment plays the same number of episodes: taking the first to finish would prefer
    short ones. Appends pictures of the first environment's first episode to `frames`.
    """
    import numpy as np

    from spmdrl.envs import make_env

    count, options = config.eval, dict(config.env.options)
    envs = min(count.num_envs, count.episodes)
    if frames is not None:
        options["render_mode"] = "rgb_array"
    seeded = dataclasses.replace(
        config, seed=count.seed, env=dataclasses.replace(config.env, options=options)
    )
    env = make_env(seeded, range(envs))
    policy, variables = load_model(config, env.spec, checkpoint)
    choose = make_chooser(policy, variables, count.deterministic, count.seed)
    each = -(-count.episodes // envs)
    score, length = np.zeros(envs), np.zeros(envs, int)
    found: list[list[tuple[float, int]]] = [[] for _ in range(envs)]
    for step in play_steps(env, policy, choose, range(envs), count.max_steps):
        if frames is not None and not found[0]:
            frames.append(env.render())
        score += np.where(step.valid, step.answer.reward, 0.0)
        length += step.valid
        for i in np.flatnonzero(step.answer.episode_over):
            found[i].append((float(score[i]), int(length[i])))
            score[i], length[i] = 0.0, 0
        if all(len(f) >= each for f in found):
            break
    env.close()
    ordered = [f[i] for i in range(each) for f in found if len(f) > i]
    if not ordered:
        raise ConfigError(f"no episode ended within eval.max_steps {count.max_steps}")
    return ordered[: count.episodes]


def summarize(
    episodes: Sequence[tuple[float, int]], config: Config, checkpoint: Path
) -> dict[str, Any]:
    import numpy as np

    returns = np.array([r for r, _ in episodes])
    std = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
    half = 1.96 * std / len(returns) ** 0.5
    return {
        "checkpoint": checkpoint.name,
        "episodes": len(returns),
        "deterministic": config.eval.deterministic,
        "seed": config.eval.seed,
        "return_mean": float(returns.mean()),
        "return_std": std,
        "return_ci95": [float(returns.mean() - half), float(returns.mean() + half)],
        "length_mean": float(np.mean([n for _, n in episodes])),
        "returns": returns.tolist(),
    }


def write_gif(frames: Sequence[Any], path: str, limit: int = 600) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("--video needs Pillow: pip install 'spmdrl[video]'") from None
    pictures = [Image.fromarray(frame) for frame in frames[:limit]]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=33, loop=0)


def check_renders(config: Config) -> None:
    """Families that draw without a display; the others would end the process."""
    if config.env.backend == "envpool":
        import envpool.registration

        family = envpool.registration.registry.specs[config.env.id][0]
        headless = ("atari", "classic_control", "box2d", "minigrid", "highway", "toy_text")
        if not family.endswith(headless):
            raise ConfigError(
                f"--video: {config.env.id} ({family}) cannot be drawn without a display; "
                f"these families can: {', '.join(headless)}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    import tyro

    options = tyro.cli(
        Options,
        args=argv,
        prog="python -m spmdrl.evaluate",
        config=(tyro.conf.PositionalRequiredArgs,),
    )
    try:
        config = eval_config(options)
        run_dir = Path(options.run_dir)
        checkpoint = find_checkpoint(run_dir, options.checkpoint, options.best)
        frames: list[Any] | None = [] if options.video else None
        if frames is not None:
            check_renders(config)
        episodes = play(config, checkpoint, frames)
        result = summarize(episodes, config, checkpoint)
        (run_dir / "eval.json").write_text(json.dumps(result, indent=2) + "\n")
        if frames is not None and options.video:
            write_gif(frames, options.video)
    except ConfigError as error:
        print(f"spmdrl: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    low, high = result["return_ci95"]
    print(
        f"{config.env.id}, {checkpoint.name}: return {result['return_mean']:.1f} "
        f"± {result['return_std']:.1f} over {result['episodes']} episodes, "
        f"95 % interval {low:.1f} to {high:.1f}, length {result['length_mean']:.0f}"
    )
    print(
        f"written to {run_dir / 'eval.json'}" + (f" and {options.video}" if options.video else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
