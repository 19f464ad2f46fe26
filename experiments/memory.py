"""What a function keeps for its backward pass."""

import collections
from collections.abc import Callable
import math
from typing import Any

import jax
from jax.extend import core


def residual_bytes(f: Callable, params, *args) -> dict[str, int]:
  """Bytes that the backward pass of ``f`` keeps, by dtype.

  Nothing is computed. The parameters and arguments themselves are not counted,
  since they are there anyway; copies of them, cast or quantised, are. Neither
  are masks, zeros and what else depends on no argument (as far as one can see
  without entering inner functions), which no compiler keeps.

  Args:
    f: a function to a scalar, differentiated in its first argument.
    params: its first argument, arrays or ``jax.ShapeDtypeStruct``.
    *args: the others.

  Returns:
    Bytes for each dtype, most first.

  >>> import jax.numpy as jnp
  >>> residual_bytes(lambda w: jnp.sin(w).sum(), jnp.ones(8))
  {'float32': 32}
  """
  forward = lambda params, *args: jax.vjp(lambda p: f(p, *args), params)
  jaxpr = jax.make_jaxpr(forward)(params, *args).jaxpr
  computed: set[core.Var] = set()
  for eqn in jaxpr.eqns:
    inputs = {var for var in eqn.invars if isinstance(var, core.Var)}
    if inputs & (computed | set(jaxpr.invars)):
      computed.update(eqn.outvars)
  outputs = jaxpr.outvars[1:]  # the first is the value
  kept = {var for var in outputs if isinstance(var, core.Var)} & computed
  total: collections.Counter[str] = collections.Counter()
  for var in kept:
    aval: Any = var.aval
    size = math.prod(aval.shape) * aval.dtype.itemsize
    total[str(aval.dtype)] += size
  return dict(total.most_common())
