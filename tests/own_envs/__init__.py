"""Environments as users write them, good and bad, for the tests of worker processes."""
