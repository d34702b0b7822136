"""Services of a running program: checkpoints, processes, metrics, profiles."""
