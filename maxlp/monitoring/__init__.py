"""Loss spikes, guards against them, and reports from the files in a workdir.

`spikes` defines what a loss spike is. During training `statistics` measures every tensor, `watch` follows
the losses, `spike_records` keeps what is needed to replay a spike, `skip_guard` skips a step, `rollback`
returns to a checkpoint, and `curves` draws the losses.
`recorder` passes the metrics of every step to them and to the outputs of the run. Afterwards `run_record`
reads a workdir and `sections` turns it into text; `maxlp.run.replay` repeats the steps before a spike.
"""
