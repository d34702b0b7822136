"""From a config to a run: reading it, checking it, and making what it describes."""
