"""Forms of layers that only a CPU likes."""
