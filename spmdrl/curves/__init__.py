"""Learning curves of runs: read, grouped by config, put together, drawn as a picture or a page."""
