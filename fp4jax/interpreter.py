"""Re-evaluates a jaxpr with its sites quantised.

Equations without a site are bound as they are. Those that hold sites are
rebuilt around the rewritten body with the public function that made them
(``jax.jit``, ``lax.scan``, ``jax.checkpoint``, ...), so every transformation of
JAX goes on working.
"""

from collections.abc import Mapping
import dataclasses
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


class Given(NamedTuple):
  """What sites have besides their operands, and the loop that runs them.

  Attributes:
    words: uint32[sites, operands, 2] key words; None without a user's key.
    loop: uint32[], the iterations of the loops around, counted as one number.
    weights: codes of weights, by ``_Interpreter.place``; a place inside of a
      scan has one for each iteration, until the scan runs.
  """

  words: jax.Array | None
  loop: jax.Array
  weights: dict[str, tuple]

  def streams(self, site: int) -> rounding.Streams | None:
    """The streams of one site's operands."""
    if self.words is None:
      return None
    return rounding.Streams(self.words, jnp.uint32(site), self.loop)

  def inside(self, length: int, index) -> "Given":
    """What one iteration of a loop of ``length`` iterations has."""
    return self._replace(
      loop=self.loop * jnp.uint32(length) + index.astype(jnp.uint32)
    )


def given(key, weights, count: int) -> Given:
  """What ``count`` sites have under a user's key and codes of weights."""
  if key is not None:
    sites, operands = np.indices((count, OPERANDS), np.uint32)
    key = rounding.site_keys(key, sites, operands)
  return Given(key, jnp.uint32(0), weights or {})


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


def evaluate(jaxpr, consts, args, plan: Plan, key=None, weights=None) -> list:
  """The outputs of a jaxpr whose sites follow a plan."""
  outs, _ = _Interpreter(plan, False).run(
    jaxpr, consts, args, (), given(key, weights, len(plan.sites)), {}
  )
  return outs


def weight_codes(jaxpr, consts, args, plan: Plan) -> dict[str, tuple]:
  """The codes of the weights of a jaxpr's sites, as ``evaluate`` takes them.

  Of conditionals, ``shard_map``, loops without a fixed length and scans that do
  not divide them there are none: they are quantised where they are used.
  """
  _, weights = _Interpreter(plan, True).run(
    jaxpr, consts, args, (), given(None, None, len(plan.sites)), {}
  )
  return weights


class _Interpreter:
  """Evaluates jaxprs under one plan.

  Attributes:
    plan: what is done at each site.
    collects: whether codes of weights are wanted.
  """

  def __init__(self, plan: Plan, collects: bool):
    self.plan = plan
    self.collects = collects
    self.numbers = plan.numbers()

  def run(self, jaxpr, consts, args, prefix, given, layers) -> tuple:
    """Evaluates a jaxpr.

    Args:
      jaxpr: with named constants.
      consts: their values.
      args: values of its inputs.
      prefix: where the jaxpr stands.
      given: what sites have besides their operands.
      layers: for each scan over layers around, a layer that stands for all of
        its current segment.

    Returns:
      The outputs, and the codes of weights, where they are wanted.
    """
    weights: dict[str, tuple] = {}
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
          outs, found = self._products(eqns, inputs, ids, given, layers)
        weights |= found
        for eqn, out in zip(eqns, outs, strict=True):
          write(eqn, [out])
        continue
      ((eqn, values, id),) = zip(eqns, inputs, ids, strict=True)
      if self.plan.below(id):
        rule = getattr(self, "_" + _jax.kind(eqn))
        with _jax.provenance(eqn):
          outs, found = rule(eqn, values, id, given, layers)
        weights |= found
        write(eqn, outs)
      else:
        write(eqn, _jax.bind(eqn, values))
    return [read(atom) for atom in jaxpr.outvars], weights

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
    """The rewritten body of an equation, as a function of ``Given`` and inputs.

    It returns what ``run`` does.
    """
    jaxpr, consts = _jax.open_jaxpr(jaxpr)

    def function(given, *args):
      outs, weights = self.run(jaxpr, consts, args, id, given, layers)
      return tuple(outs), weights

    function.__name__ = function.__qualname__ = name or "fp4jax"
    return function

  def place(self, id, layers) -> str:
    """The name of a site's weight in the current segments of its stacks.

    Outside of inner stacks it is what all names there begin with.
    """
    site = self.plan.sites[id]
    around = [stack.id for stack in site.stacks if stack.id in layers]
    segments = "".join(f"[{layers[stack]}]" for stack in around)
    return f"{self.numbers[id]}:{site.path}{segments}"

  def _dot_general(self, eqn, values, id, given, layers):
    if not self._recipe(id, layers).quantises:
      return _jax.bind(eqn, values), {}
    return self._products([eqn], [values], [id], given, layers)

  def _products(self, eqns, inputs, ids, given, layers):
    """Sites that share an operand, evaluated together."""
    products = [
      self._product(eqn, values, id, given, layers)
      for eqn, values, id in zip(eqns, inputs, ids, strict=True)
    ]
    weights = {}
    for id, one in zip(ids, products, strict=True):
      codes = one.weight_codes() if self.collects else None
      if codes is not None:
        weights[self.place(id, layers)] = codes
    return multiply(products), weights

  def _product(self, eqn, values, id, given, layers) -> Product:
    """A quantised site as a product to evaluate."""
    params = eqn.params
    site = self.plan.sites[id]
    lhs, rhs = values
    return product(
      lhs,
      rhs,
      params["dimension_numbers"],
      recipe=self._recipe(id, layers),
      key=given.streams(self.numbers[id]),
      weight=site.weight,
      precision=params["precision"],
      preferred_element_type=eqn.outvars[0].aval.dtype,
      backend=self.plan.backend,
      site=site.path,
      codes=given.weights.get(self.place(id, layers)),
    )

  def _ragged_dot_general(self, eqn, values, id, given, layers):
    recipe = self._recipe(id, layers)
    if not recipe.quantises:
      return _jax.bind(eqn, values), {}
    lhs, rhs, group_sizes = values
    out = ragged.ragged_dot(
      lhs,
      rhs,
      group_sizes,
      recipe=recipe,
      key=given.streams(self.numbers[id]),
      precision=eqn.params["precision"],
      preferred_element_type=eqn.outvars[0].aval.dtype,
      backend=self.plan.backend,
      site=self.plan.sites[id].path,
    )
    return [out], {}

  def _call(self, eqn, values, id, given, layers):
    params = eqn.params
    name = params.get("name", "")
    function = self._function(_jax.call_jaxpr(eqn), id, layers, name)
    if "in_shardings" not in params:
      return function(given, *values)
    options: dict = {"inline": params["inline"]}
    shardings = _jax.given_shardings(params["in_shardings"])
    if shardings is not None:
      options["in_shardings"] = (None, *shardings)
    shardings = _jax.given_shardings(params["out_shardings"])
    if shardings is not None:
      options["out_shardings"] = shardings, None
    return jax.jit(function, **options)(given, *values)

  def _remat(self, eqn, values, id, given, layers):
    params = eqn.params
    function = self._function(_jax.call_jaxpr(eqn), id, layers)
    return jax.checkpoint(
      function, prevent_cse=params["prevent_cse"], policy=params["policy"]
    )(given, *values)

  def _cond(self, eqn, values, id, given, layers):
    index, *operands = values
    branches = [
      self._outputs(branch, (*id, i), layers)
      for i, branch in enumerate(eqn.params["branches"])
    ]
    return lax.switch(index, branches, given, *operands), {}

  def _outputs(self, jaxpr, id, layers):
    """``_function`` without the codes of weights."""
    function = self._function(jaxpr, id, layers)
    return lambda given, *args: function(given, *args)[0]

  def _while(self, eqn, values, id, given, layers):
    params = eqn.params
    c, b = params["cond_nconsts"], params["body_nconsts"]
    cond = self._outputs(params["cond_jaxpr"], (*id, 0), layers)
    body = self._outputs(params["body_jaxpr"], (*id, 1), layers)
    cond_consts, body_consts = values[:c], values[c : c + b]

    def inside(i):
      # The number of iterations is not known: a prime keeps nested loops apart.
      return given.inside(1_000_003, i)

    def cond_fun(carry):
      i, *state = carry
      return cond(inside(i), *cond_consts, *state)[0]

    def body_fun(carry):
      i, *state = carry
      return (i + 1, *body(inside(i), *body_consts, *state))

    start = (jnp.uint32(0), *values[c + b :])
    return lax.while_loop(cond_fun, body_fun, start)[1:], {}

  def _scan(self, eqn, values, id, given, layers):
    scan = _jax.scan(eqn)
    consts = values[: scan.consts]
    carry = tuple(values[scan.consts :][: scan.carry])
    xs = tuple(values[scan.consts + scan.carry :])
    segments = self._segments(id, scan.length, layers)
    sizes = [stop - start for start, stop in segments]
    indices = jnp.arange(scan.length, dtype=jnp.uint32)
    parts = _split((indices, *xs), sizes)
    ys_parts: list = [()] * len(segments)
    weights: dict[str, tuple] = {}
    order = range(len(segments))
    for n in reversed(order) if scan.reverse else order:
      start, stop = segments[n]
      here = {**layers, id: start}
      function = self._function(scan.body, id, here)
      # Weights that the scan does not divide are not to be stacked.
      divided = tuple(
        self.place(site, here)
        for site in self.plan.below(id)
        if id in (stack.id for stack in self.plan.sites[site].stacks)
      )

      def chosen(weights, divided=divided):
        return {p: v for p, v in weights.items() if p.startswith(divided)}

      def body(carry, x, function=function, chosen=chosen):
        (i, *x), codes = x
        inside = given.inside(scan.length, i)
        inside = inside._replace(weights=given.weights | codes)
        outs, found = function(inside, *consts, *carry, *x)
        return outs[: scan.carry], (outs[scan.carry :], chosen(found))

      carry, (ys_parts[n], found) = lax.scan(
        body,
        carry,
        (parts[n], chosen(given.weights)),
        length=stop - start,
        reverse=scan.reverse,
        unroll=max(1, min(scan.unroll, stop - start)),
      )
      weights |= found
    ys = [
      jnp.concatenate(y) if len(y) > 1 else y[0]
      for y in zip(*ys_parts, strict=True)
    ]
    return [*carry, *ys], weights

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

  def _shard_map(self, eqn, values, id, given, layers):
    params = eqn.params
    function = self._outputs(params["jaxpr"], id, layers)
    given = given._replace(weights={})
    replicated = jax.tree.map(lambda _: PartitionSpec(), given)
    outs = jax.shard_map(
      function,
      mesh=params["mesh"],
      in_specs=(replicated, *params["in_specs"]),
      out_specs=tuple(params["out_specs"]),
      check_vma=params["check_vma"],
      axis_names=set(params["newly_manual_axes"]),
    )(given, *values)
    return outs, {}


def _split(xs, sizes):
  """Stacked arrays divided along their first axis; one tuple a part."""
  if len(sizes) == 1:
    return [xs]
  return list(zip(*(lax.split(x, sizes) for x in xs), strict=True))
