"""What a run would need on machines that are not here.

* `topologies`: machines by name, their chips' memory and speeds, and devices to compile for;
* `compiled`: what the compiler says of the real train step;
* `hlo`: the collectives of a compiled program;
* `estimate`, `estimate_clip`: a closed form of the same, without any compiler; `FORMS` has the one of each
  family of models, a module with functions `memory`, `work` and `collectives`;
* `bounds`: seconds of a step, from FLOPs, bytes and collectives;
* `search`: the nearest settings that fit;
* `picture`: a plan as an image.

`maxlp.plan` is the command.
"""

from maxlp.families.clip import cost as estimate_clip
from maxlp.families.llama import cost as estimate

FORMS = {"llama": estimate, "clip": estimate_clip}
