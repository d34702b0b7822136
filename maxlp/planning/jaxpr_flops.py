"""The matmuls and decompositions of a traced program, without a compiler and on no mesh."""

import math

from jax.extend import core


def matmul_flops(jaxpr: core.Jaxpr) -> float:
    """FLOPs of all matmuls; a multiply-add counts as two.

    Of a `jax.lax.cond` the cheapest branch counts: in optimizers the others are rare. What `decompositions`
    names is not counted, and the body of a `jax.lax.while_loop` counts once.
    """
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [matmul_flops(one) for one in core.jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[dim] for dim in contracted)
        elif eqn.primitive.name == "cond":
            total += min(inner)
        else:
            total += eqn.params.get("length", 1) * sum(inner)  # of a scan
    return total


def decompositions(jaxpr: core.Jaxpr) -> frozenset[str]:
    """The decompositions of matrices in a program, in branches too: of "eigh", "qr" and "svd"."""
    inner = (decompositions(one) for eqn in jaxpr.eqns for one in core.jaxprs_in_params(eqn.params))
    here = {eqn.primitive.name for eqn in jaxpr.eqns} & {"eigh", "qr", "svd"}
    return frozenset(here).union(*inner)
