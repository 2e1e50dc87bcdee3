"""Ranks, devices, and what is summed over them."""
