"""Texts for batch systems and lists of hosts."""
