"""pytest wiring: the suite's plugin, nothing else."""

pytest_plugins = ["conformance.plugin"]
