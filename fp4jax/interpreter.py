"""Re-evaluates a jaxpr with its sites quantised.

Equations without a site are bound as they are. Those that hold sites are
rebuilt around the rewritten body with the public function that made them
(``jax.jit``, ``lax.scan``, ``jax.checkpoint``, ...), so every transformation of
JAX goes on working.
"""

from collections.abc import Mapping
import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from fp4jax import _jax
from fp4jax import dataflow
from fp4jax import policy
from fp4jax import ragged
from fp4jax import rounding
from fp4jax import siblings
from fp4jax.dot import Product
from fp4jax.dot import multiply
from fp4jax.dot import product
from fp4jax.dot import shares
from fp4jax.dot import x_axes
from fp4jax.operands import OPERANDS


class Keys(NamedTuple):
  """The random streams of all sites, and the loop that runs them.

  Attributes:
    words: uint32[sites, operands, 2] key words.
    loop: uint32[], the iterations of the loops around, counted as one number.
  """

  words: jax.Array
  loop: jax.Array

  def streams(self, site: int) -> rounding.Streams:
    """The streams of one site's operands."""
    return rounding.Streams(self.words, jnp.uint32(site), self.loop)

  def inside(self, length: int, index) -> "Keys":
    """The keys of one iteration of a loop of ``length`` iterations."""
    return self._replace(
      loop=self.loop * jnp.uint32(length) + index.astype(jnp.uint32)
    )


def site_keys(key, count: int) -> Keys:
  """The keys of ``count`` sites under a user's key."""
  sites, operands = np.indices((count, OPERANDS), np.uint32)
  return Keys(rounding.site_keys(key, sites, operands), jnp.uint32(0))


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """What is done at each site.

  Attributes:
    sites: the sites that can be quantised, by where their equation stands.
    decisions: for each of them, a decision for each position in its stacks.
    backend: the backend asked for.
  """

  sites: Mapping[dataflow.Id, dataflow.Site]
  decisions: Mapping[dataflow.Id, list[policy.Decision]]
  backend: str | None = None

  def numbers(self) -> dict[dataflow.Id, int]:
    """The sites' numbers, which their random streams are made of."""
    return {id: i for i, id in enumerate(self.sites)}

  def below(self, prefix: dataflow.Id) -> list[dataflow.Id]:
    """Quantised sites inside an equation."""
    return [
      id
      for id in self.sites
      if id[: len(prefix)] == prefix
      and any(d.recipe.quantises for d in self.decisions[id])
    ]


def evaluate(jaxpr, consts, args, plan: Plan, key=None) -> list:
  """The outputs of a jaxpr whose sites follow a plan."""
  keys = None if key is None else site_keys(key, len(plan.sites))
  return _Interpreter(plan).run(jaxpr, consts, args, (), keys, {})


class _Interpreter:
  """Evaluates jaxprs under one plan."""

  def __init__(self, plan: Plan):
    self.plan = plan
    self.numbers = plan.numbers()

  def run(self, jaxpr, consts, args, prefix, keys, layers) -> list:
    """Evaluates a jaxpr.

    Args:
      jaxpr: with named constants.
      consts: their values.
      args: values of its inputs.
      prefix: where the jaxpr stands.
      keys: ``Keys``, or None without a user's key.
      layers: for each scan over layers around, a layer that stands for all of
        its current segment.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
      return atom.val if _jax.is_literal(atom) else env[atom]

    def write(eqn, outs):
      env.update(zip(eqn.outvars, outs, strict=True))

    for group in self._schedule(jaxpr, prefix, layers):
      eqns = [jaxpr.eqns[i] for i in group]
      inputs = [[read(atom) for atom in eqn.invars] for eqn in eqns]
      ids = [(*prefix, i) for i in group]
      if len(group) > 1:
        with _jax.provenance(eqns[0]):
          products = map(
            functools.partial(self._product, keys=keys, layers=layers),
            eqns,
            inputs,
            ids,
          )
          for eqn, out in zip(eqns, multiply([*products]), strict=True):
            write(eqn, [out])
        continue
      ((eqn, values, id),) = zip(eqns, inputs, ids, strict=True)
      if self.plan.below(id):
        rule = getattr(self, "_" + _jax.kind(eqn))
        with _jax.provenance(eqn):
          write(eqn, rule(eqn, values, id, keys, layers))
      else:
        write(eqn, _jax.bind(eqn, values))
    return [read(atom) for atom in jaxpr.outvars]

  def _schedule(self, jaxpr, prefix, layers):
    """Equations in order, linear layers of one operand together."""
    names = siblings.names(jaxpr)
    operands = {}
    for i, eqn in enumerate(jaxpr.eqns):
      id = (*prefix, i)
      if id not in self.plan.sites or _jax.kind(eqn) != "dot_general":
        continue
      recipe = self._recipe(id, layers)
      if shares(recipe):
        weight = self.plan.sites[id].weight
        assert weight is not None  # a site of the plan is a linear layer
        x = eqn.invars[weight == "lhs"]
        axes = x_axes(eqn.params["dimension_numbers"], weight)
        operands[i] = (names.get(x, x), axes, recipe)
    return siblings.schedule(jaxpr, operands)

  def _recipe(self, id, layers):
    position = 0
    for stack in self.plan.sites[id].stacks:
      position = position * stack.length + layers[stack.id]
    return self.plan.decisions[id][position].recipe

  def _function(self, jaxpr, id, layers, name=""):
    """The rewritten body of an equation, as a function of keys and inputs."""
    jaxpr, consts = _jax.open_jaxpr(jaxpr)

    def function(keys, *args):
      return tuple(self.run(jaxpr, consts, args, id, keys, layers))

    function.__name__ = function.__qualname__ = name or "fp4jax"
    return function

  def _dot_general(self, eqn, values, id, keys, layers):
    if not self._recipe(id, layers).quantises:
      return _jax.bind(eqn, values)
    return multiply([self._product(eqn, values, id, keys, layers)])

  def _product(self, eqn, values, id, keys, layers) -> Product:
    """A quantised site as a product to evaluate."""
    params = eqn.params
    site = self.plan.sites[id]
    lhs, rhs = values
    return product(
      lhs,
      rhs,
      params["dimension_numbers"],
      recipe=self._recipe(id, layers),
      key=None if keys is None else keys.streams(self.numbers[id]),
      weight=site.weight,
      precision=params["precision"],
      preferred_element_type=eqn.outvars[0].aval.dtype,
      backend=self.plan.backend,
      site=site.path,
    )

  def _ragged_dot_general(self, eqn, values, id, keys, layers):
    recipe = self._recipe(id, layers)
    if not recipe.quantises:
      return _jax.bind(eqn, values)
    lhs, rhs, group_sizes = values
    out = ragged.ragged_dot(
      lhs,
      rhs,
      group_sizes,
      recipe=recipe,
      key=None if keys is None else keys.streams(self.numbers[id]),
      precision=eqn.params["precision"],
      preferred_element_type=eqn.outvars[0].aval.dtype,
      backend=self.plan.backend,
      site=self.plan.sites[id].path,
    )
    return [out]

  def _call(self, eqn, values, id, keys, layers):
    params = eqn.params
    name = params.get("name", "")
    function = self._function(_jax.call_jaxpr(eqn), id, layers, name)
    if "in_shardings" not in params:
      return function(keys, *values)
    options: dict = {"inline": params["inline"]}
    given = _jax.given_shardings(params["in_shardings"])
    if given is not None:
      options["in_shardings"] = (None, *given)
    given = _jax.given_shardings(params["out_shardings"])
    if given is not None:
      options["out_shardings"] = given
    return jax.jit(function, **options)(keys, *values)

  def _remat(self, eqn, values, id, keys, layers):
    params = eqn.params
    function = self._function(_jax.call_jaxpr(eqn), id, layers)
    return jax.checkpoint(
      function, prevent_cse=params["prevent_cse"], policy=params["policy"]
    )(keys, *values)

  def _cond(self, eqn, values, id, keys, layers):
    index, *operands = values
    branches = [
      self._function(branch, (*id, i), layers)
      for i, branch in enumerate(eqn.params["branches"])
    ]
    return lax.switch(index, branches, keys, *operands)

  def _while(self, eqn, values, id, keys, layers):
    params = eqn.params
    c, b = params["cond_nconsts"], params["body_nconsts"]
    cond = self._function(params["cond_jaxpr"], (*id, 0), layers)
    body = self._function(params["body_jaxpr"], (*id, 1), layers)
    cond_consts, body_consts = values[:c], values[c : c + b]

    def inside(i):
      # The number of iterations is not known: a prime keeps nested loops apart.
      return None if keys is None else keys.inside(1_000_003, i)

    def cond_fun(carry):
      i, *state = carry
      return cond(inside(i), *cond_consts, *state)[0]

    def body_fun(carry):
      i, *state = carry
      return (i + 1, *body(inside(i), *body_consts, *state))

    start = (jnp.uint32(0), *values[c + b :])
    return lax.while_loop(cond_fun, body_fun, start)[1:]

  def _scan(self, eqn, values, id, keys, layers):
    scan = _jax.scan(eqn)
    consts = values[: scan.consts]
    carry = tuple(values[scan.consts :][: scan.carry])
    xs = tuple(values[scan.consts + scan.carry :])
    segments = self._segments(id, scan.length, layers)
    sizes = [stop - start for start, stop in segments]
    indices = jnp.arange(scan.length, dtype=jnp.uint32)
    parts = _split((indices, *xs), sizes)
    ys_parts: list = [()] * len(segments)
    order = range(len(segments))
    for n in reversed(order) if scan.reverse else order:
      start, stop = segments[n]
      function = self._function(scan.body, id, {**layers, id: start})

      def body(carry, x, function=function):
        i, *x = x
        inside = None if keys is None else keys.inside(scan.length, i)
        outs = function(inside, *consts, *carry, *x)
        return outs[: scan.carry], outs[scan.carry :]

      carry, ys_parts[n] = lax.scan(
        body,
        carry,
        parts[n],
        length=stop - start,
        reverse=scan.reverse,
        unroll=max(1, min(scan.unroll, stop - start)),
      )
    ys = [
      jnp.concatenate(y) if len(y) > 1 else y[0]
      for y in zip(*ys_parts, strict=True)
    ]
    return [*carry, *ys]

  def _segments(self, id, length, layers) -> list[tuple[int, int]]:
    """Runs of layers of a scan that follow the same decisions."""

    def signature(layer):
      chosen = []
      for site_id in self.plan.below(id):
        at = {**layers, id: layer}
        stacks = self.plan.sites[site_id].stacks
        inner = [[at[s.id]] if s.id in at else range(s.length) for s in stacks]
        for position in itertools.product(*inner):
          here = dict(zip((s.id for s in stacks), position, strict=True))
          chosen.append(self._recipe(site_id, here))
      return chosen

    starts = [0]
    for layer in range(1, length):
      if signature(layer) != signature(layer - 1):
        starts.append(layer)
    return list(zip(starts, [*starts[1:], length], strict=True))

  def _shard_map(self, eqn, values, id, keys, layers):
    params = eqn.params
    function = self._function(params["jaxpr"], id, layers)
    replicated = jax.tree.map(lambda _: PartitionSpec(), keys)
    return jax.shard_map(
      function,
      mesh=params["mesh"],
      in_specs=(replicated, *params["in_specs"]),
      out_specs=tuple(params["out_specs"]),
      check_vma=params["check_vma"],
      axis_names=set(params["newly_manual_axes"]),
    )(keys, *values)


def _split(xs, sizes):
  """Stacked arrays divided along their first axis; one tuple a part."""
  if len(sizes) == 1:
    return [xs]
  return list(zip(*(lax.split(x, sizes) for x in xs), strict=True))
