"""What every metric means. A test finds names in the code that are not described here."""

from __future__ import annotations

from typing import NamedTuple

from spmdrl.algos import ALGORITHMS

__all__ = ["METRICS", "Metric", "describe_metric"]


class Metric(NamedTuple):
    name: str
    """N stands for a number."""
    when: str
    """In which runs there is one."""
    meaning: str


ALWAYS, RANKS, ROLES = "every run", "several ranks", "actors and learners"

OURS = (
    Metric("progress/update", ALWAYS, "updates so far; of a clone, epochs"),
    Metric("progress/steps", ALWAYS, "environment steps so far, of all ranks together"),
    Metric("progress/eta_s", ALWAYS, "seconds left at the present speed"),
    Metric("perf/sps", ALWAYS, "environment steps per second since the last row"),
    Metric("episode/return_mean", ALWAYS, "mean raw return of the last `log.window` episodes"),
    Metric("episode/length_mean", ALWAYS, "mean length of the same episodes, in steps"),
    Metric("episode/count", ALWAYS, "episodes that have ended since the run began"),
    Metric("loss/policy", ALWAYS, "policy loss, mean over the minibatches of the update"),
    Metric("loss/value", ALWAYS, "value loss, before `algo.value_coef`"),
    Metric("loss/entropy", ALWAYS, "entropy of the policy, in nats, before `algo.entropy_coef`"),
    Metric("loss/nll", "clones", "negative log-likelihood of the recorded actions"),
    Metric("rollout/lag", "lag of 1 or more", "updates between the model that acted and this one"),
    Metric("optim/lr", ALWAYS, "learning rate"),
    Metric("optim/grad_norm", ALWAYS, "norm of the gradient before clipping"),
    Metric("optim/skipped", ALWAYS, "gradients left out because a number was not finite"),
    Metric("time/collect", ALWAYS, "seconds of collecting rollouts since the last row, on rank 0"),
    Metric("time/env", "stepped from Python", "part of collect: waiting for the simulator"),
    Metric("time/inference", "stepped from Python", "part of collect: the policy"),
    Metric("time/wait", ALWAYS, "seconds of waiting for the slowest rank"),
    Metric("time/update", ALWAYS, "seconds of learning"),
    Metric("time/comm", RANKS, "part of update: sums over ranks, estimated from probes"),
    Metric("time/check", ALWAYS, "seconds of comparing the ranks' parameters"),
    Metric("time/save", ALWAYS, "seconds for which a checkpoint held up the training"),
    Metric("time/other", ALWAYS, "the rest: logging, the panel"),
    Metric("time/eval", "eval.every", "seconds of evaluation, while the other ranks waited"),
    Metric("eval/return_mean", "eval.every", "mean raw return of the evaluation's episodes"),
    Metric("eval/return_std", "eval.every", "standard deviation of the same"),
    Metric("eval/length_mean", "eval.every", "mean length of the same episodes, in steps"),
    Metric("eval/episodes", "eval.every", "how many they were"),
    Metric("rank/slowest", RANKS, "the rank that took longest to collect"),
    Metric("rank/N/collect", "2 to 16 ranks", "seconds of collecting on rank N"),
    Metric("rank/N/wait", "2 to 16 ranks", "seconds of waiting on rank N"),
    Metric("rank/N/update", "2 to 16 ranks", "seconds of learning on rank N"),
    Metric("roles/lag_mean", ROLES, "updates between a rollout's model and the one that learns"),
    Metric("roles/lag_max", ROLES, "the same of the rollout that is furthest behind"),
    Metric("roles/learner_idle", ROLES, "share of the time that rank 0 waited for rollouts"),
    Metric("roles/actor_idle_mean", ROLES, "share of the time that its actors waited for models"),
    Metric("roles/actor_idle_max", ROLES, "the same of the actor that waited longest"),
    Metric("roles/slowest", ROLES, "rank of the actor that took longest"),
    Metric("roles/ready", ROLES, "rollouts that were there already when one was asked for"),
    Metric("roles/wait_ms_p50", ROLES, "median of the learner's waits, in ms"),
    Metric("roles/wait_ms_p95", ROLES, "95th percentile of the same"),
    Metric("roles/send_ms_p50", ROLES, "what an actor spends on handing over a rollout, in ms"),
    Metric("roles/rollout_bytes", ROLES, "bytes of a rollout, of all of rank 0's actors"),
    Metric("roles/params_bytes", ROLES, "bytes of a model on its way to an actor"),
    Metric("comm/bytes_per_update", RANKS, "bytes of gradient that each rank adds per update"),
    Metric("comm/allreduce_ms_p50", RANKS, "median of the probes: one sum over ranks, in ms"),
    Metric("comm/allreduce_ms_p95", RANKS, "95th percentile of the same"),
)


def of_algorithms() -> tuple[Metric, ...]:
    """What they report, each metric once."""
    meanings = {name: meaning for algo in ALGORITHMS for name, meaning in algo.metrics}
    owners = {
        name: [a.__name__ for a in ALGORITHMS if name in dict(a.metrics)] for name in meanings
    }
    return tuple(Metric(name, ", ".join(owners[name]), meanings[name]) for name in meanings)


METRICS = (*OURS, *of_algorithms())


def describe_metric(name: str) -> Metric | None:
    """The row of a metric by its name in a file; None for one of an algorithm of the user's."""
    general = "/".join("N" if part.isdecimal() else part for part in name.split("/"))
    return next((metric for metric in METRICS if metric.name == general), None)
