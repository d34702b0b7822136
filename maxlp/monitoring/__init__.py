"""Watching a run: loss spikes, guards against them, replays, and what a workdir tells about its run.

`spikes` defines what a loss spike is. During training `statistics` measures every tensor, `watch` follows
the losses and records spikes, `guards` skips a step or rolls the run back, and `curves` draws the losses.
Afterwards `run_record` reads a workdir, `sections` turns it into text, and `replay` repeats the steps
before a spike.
"""
