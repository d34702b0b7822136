"""Loss spikes: what foretells them, which steps are one, what to do about them, which tensor began it.

statistics   RMS_t and gradient norm of every tensor, inside the compiled step
spikes       the one definition of a spike, for the live run, the guard and the report
guard        skip a bad batch (on the device), or go back to before it (on the host)
watch        follows a run and writes down what is known at a spike
replay       runs the steps before a spike again, in any precision

A run is told by its config section ``spikes``: the keywords of `spikes.Policy`.
"""
