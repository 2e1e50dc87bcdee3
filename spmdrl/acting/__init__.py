"""Parameters in, rollouts out."""
