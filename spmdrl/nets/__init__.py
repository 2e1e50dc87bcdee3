"""Networks: parameters to action distribution and value."""

from spmdrl.nets.policy import Policy, make_policy

__all__ = ["Policy", "make_policy"]
