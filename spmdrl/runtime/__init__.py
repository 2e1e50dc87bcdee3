"""A run: its loop, its files, its guards."""
