"""Planning: what a run would need on machines that are not available here.

* `topologies`: machines by name, the memory and speeds of their chips, and devices to compile for;
* `compiled`: the memory and collectives of the real train step, from the compiler;
* `hlo`: the collectives of a compiled program, from its text;
* `cost_model`: a closed form of the same without a compiler; each family has its own (``cost.py``);
* `roofline`: seconds of a step, from FLOPs, bytes and collectives;
* `search`: the fastest settings that fit;
* `plot`: a plan as an image.

`maxlp.plan` is the command.
"""
