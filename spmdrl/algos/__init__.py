"""Losses as pure functions."""
