"""Layers in the form that is fastest on CPUs."""
