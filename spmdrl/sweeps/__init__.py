"""Many runs of one config: which ones, and their processes."""
