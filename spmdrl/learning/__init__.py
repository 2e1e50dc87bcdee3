"""A rollout in, a new train state out."""
