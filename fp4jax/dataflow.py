"""Finding the linear layers of a jaxpr by the flow of the parameters.

A value is a *weight* when it is computed from parameters alone: constants and
scalars may scale it, data may not enter. A contraction of one weight with
something else is a linear layer, a *site*; a product of activations (QKᵀ), or
of two weights, is not.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from fp4jax import _jax

# How much of the data has entered a value.
_NONE, _UNIFORM, _DATA = range(3)

Id = tuple[int, ...]
"""Where an equation stands: indices along the nesting of jaxprs."""


@dataclasses.dataclass(frozen=True)
class Stack:
  """A scan that consumes a stacked weight one layer an iteration."""

  id: Id
  length: int


@dataclasses.dataclass(frozen=True)
class Weight:
  """A parameter, and the scans that slice its leading axes."""

  path: str
  stacks: tuple[Stack, ...] = ()


@dataclasses.dataclass(frozen=True)
class Flow:
  """Where a value comes from.

  Attributes:
    weights: the parameters that it is computed from.
    data: whether data has entered: not at all, as scalars only, or as arrays.
  """

  weights: frozenset[Weight] = frozenset()
  data: int = _NONE

  @property
  def is_weight(self) -> bool:
    return bool(self.weights) and self.data < _DATA

  def scalar(self) -> "Flow":
    """The flow of the value once it is reduced to a scalar."""
    return dataclasses.replace(self, data=min(self.data, _UNIFORM))


CONSTANT = Flow()
DATA = Flow(data=_DATA)


def join(flows: Iterable[Flow]) -> Flow:
  """The flow of what is computed from several values."""
  flows = tuple(flows)
  return Flow(
    frozenset().union(*(f.weights for f in flows)),
    max((f.data for f in flows), default=_NONE),
  )


@dataclasses.dataclass(frozen=True)
class Site:
  """One contraction of the model.

  Attributes:
    id: where its equation stands.
    kind: "dot_general", "ragged_dot_general", "conv_general_dilated", or the
      name of an opaque primitive that holds contractions.
    name: the name stack (linen's module path), "" where there is none.
    paths: the paths of its weight's parameters, none where it is no linear
      layer.
    stacks: the scans over layers around it, outermost first.
    lhs: shape and dtype of the left operand.
    rhs: shape and dtype of the right operand.
    weight: "lhs" or "rhs" where it is a linear layer.
    reason: why it is none, or why it cannot be quantised.
  """

  id: Id
  kind: str
  name: str
  paths: tuple[str, ...]
  stacks: tuple[Stack, ...]
  lhs: Any
  rhs: Any
  weight: str | None
  reason: str

  @property
  def path(self) -> str:
    """The site's name: its weight's path."""
    return " + ".join(self.paths)

  @property
  def scanned(self) -> bool:
    """Whether a scan slices its weight out of a stack."""
    return bool(self.stacks)

  @property
  def positions(self) -> int:
    """Layers that the site runs as, 1 outside of scans over layers."""
    return math.prod(stack.length for stack in self.stacks)


def find_sites(jaxpr, flows: Sequence[Flow]) -> list[Site]:
  """All contractions of a jaxpr, in order of execution.

  Args:
    jaxpr: as traced by ``jax.jit(...).trace``.
    flows: the flow of each of its inputs.

  Returns:
    The sites; those with a ``weight`` and without a ``reason`` can be
    quantised.
  """
  sites: list[Site] = []
  _walk(jaxpr, flows, (), "", sites)
  return sites


def _walk(jaxpr, flows, prefix: Id, names: str, sites: list | None):
  """Propagates flows through a jaxpr; appends its sites unless None."""
  jaxpr, _ = _jax.open_jaxpr(jaxpr)
  env = dict.fromkeys(jaxpr.constvars, CONSTANT)
  env.update(zip(jaxpr.invars, flows, strict=True))

  def read(atom):
    return CONSTANT if _jax.is_literal(atom) else env[atom]

  for i, eqn in enumerate(jaxpr.eqns):
    inputs = [read(atom) for atom in eqn.invars]
    name = "/".join(filter(None, (names, _jax.name_stack(eqn))))
    rule = _RULES.get(_jax.kind(eqn), _plain)
    outputs = rule(eqn, inputs, (*prefix, i), name, sites)
    for var, flow in zip(eqn.outvars, outputs, strict=True):
      env[var] = flow.scalar() if getattr(var.aval, "shape", ()) == () else flow
  return [read(atom) for atom in jaxpr.outvars]


def _plain(eqn, inputs, id, name, sites):
  """Any other primitive: its outputs come from all of its inputs."""
  if sites is not None and any(
    map(_jax.holds_contraction, _jax.sub_jaxprs(eqn))
  ):
    reason = f"inside {eqn.primitive.name}, which keeps its own rules"
    sites.append(
      Site(id, eqn.primitive.name, name, (), (), None, None, None, reason)
    )
  return [join(inputs)] * len(eqn.outvars)


def _lookup(eqn, inputs, id, name, sites):
  """gather, dynamic_slice: rows that data picks are data, a matrix is not."""
  out = join(inputs)
  shape = eqn.outvars[0].aval.shape
  by_data = max(f.data for f in inputs[1:]) > _NONE
  if by_data and sum(size > 1 for size in shape) < 2:
    out = dataclasses.replace(out, data=_DATA)
  return [out]


def _contraction(eqn, inputs, id, name, sites):
  lhs, rhs = inputs[:2]
  sides = [s for s, f in (("lhs", lhs), ("rhs", rhs)) if f.is_weight]
  weights = (lhs if sides == ["lhs"] else rhs).weights if sides else ()
  kind = _jax.kind(eqn)
  reason = ""
  if not sides:
    reason = "no operand comes from the parameters"
  elif len(sides) == 2:
    reason = "both operands come from the parameters"
  elif not all(_jax.is_float(v.aval) for v in eqn.invars[:2]):
    lhs_dtype, rhs_dtype = (v.aval.dtype for v in eqn.invars[:2])
    reason = (
      f"operands are {lhs_dtype} and {rhs_dtype}, not both real floats: cast"
      " them"
    )
  elif kind == "conv_general_dilated":
    reason = "convolutions are not quantised"
  elif kind == "ragged_dot_general":
    reason = _ragged_reason(eqn, sides[0])
  if sites is not None:
    linear = len(sides) == 1
    stacks = sorted(
      {s for w in weights for s in w.stacks}, key=lambda s: len(s.id)
    )
    sites.append(
      Site(
        id=id,
        kind=kind,
        name=name,
        paths=tuple(sorted({w.path for w in weights})) if linear else (),
        stacks=tuple(stacks) if linear else (),
        lhs=eqn.invars[0].aval,
        rhs=eqn.invars[1].aval,
        weight=sides[0] if linear else None,
        reason=reason,
      )
    )
  return [join(inputs)] * len(eqn.outvars)


def _ragged_reason(eqn, side: str) -> str:
  """Why a ragged_dot_general is not the experts' product x[m, k] w[g, k, n]."""
  numbers = eqn.params["ragged_dot_dimension_numbers"]
  contract, batch = numbers.dot_dimension_numbers
  plain = (
    side == "rhs"
    and tuple(map(tuple, batch)) == ((), ())
    and tuple(map(tuple, contract)) == ((1,), (1,))
    and tuple(numbers.lhs_ragged_dimensions) == (0,)
    and tuple(numbers.rhs_group_dimensions) == (0,)
    and eqn.params["group_offset"] is None
  )
  if plain:
    return ""
  return "ragged_dot_general other than lhs [m, k], rhs [g, k, n]"


def _call(eqn, inputs, id, name, sites):
  return _walk(_jax.call_jaxpr(eqn), inputs, id, name, sites)


def _custom_rule(eqn, inputs, id, name, sites):
  """custom_jvp, custom_vjp: opaque where they hold contractions."""
  _plain(eqn, inputs, id, name, sites)
  return _walk(_jax.call_jaxpr(eqn), inputs, id, name, None)


def _cond(eqn, inputs, id, name, sites):
  index, *operands = inputs
  branches = [
    _walk(branch, operands, (*id, i), name, sites)
    for i, branch in enumerate(eqn.params["branches"])
  ]
  return [join((index, *flows)) for flows in zip(*branches, strict=True)]


def _while(eqn, inputs, id, name, sites):
  params = eqn.params
  c, b = params["cond_nconsts"], params["body_nconsts"]
  cond_consts, body_consts, carry = (
    inputs[:c],
    inputs[c : c + b],
    inputs[c + b :],
  )

  def body(carry, sites):
    return _walk(
      params["body_jaxpr"], [*body_consts, *carry], (*id, 1), name, sites
    )

  carry = _fixpoint(lambda carry: body(carry, None), carry)
  _walk(params["cond_jaxpr"], [*cond_consts, *carry], (*id, 0), name, sites)
  return body(carry, sites)


def _scan(eqn, inputs, id, name, sites):
  scan = _jax.scan(eqn)
  consts, carry = inputs[: scan.consts], inputs[scan.consts :][: scan.carry]
  stack = Stack(id, scan.length)
  xs = [_sliced(flow, stack) for flow in inputs[scan.consts + scan.carry :]]

  def body(carry, sites):
    outs = _walk(scan.body, [*consts, *carry, *xs], id, name, sites)
    return [_unsliced(flow, stack) for flow in outs]

  carry = _fixpoint(lambda carry: body(carry, None)[: scan.carry], carry)
  outs = body(carry, sites)
  ys = [
    dataclasses.replace(f, data=_DATA) if f.data else f
    for f in outs[scan.carry :]
  ]
  return [*carry, *ys]


def _sliced(flow: Flow, stack: Stack) -> Flow:
  """One layer of a stacked value."""
  return dataclasses.replace(
    flow,
    weights=frozenset(Weight(w.path, (*w.stacks, stack)) for w in flow.weights),
  )


def _unsliced(flow: Flow, stack: Stack) -> Flow:
  """A value that leaves the scan."""
  return dataclasses.replace(
    flow,
    weights=frozenset(
      Weight(w.path, tuple(s for s in w.stacks if s != stack))
      for w in flow.weights
    ),
  )


def _fixpoint(step, carry):
  """The least flows of a loop's carry that its body keeps."""
  while True:
    after = [join(pair) for pair in zip(carry, step(carry), strict=True)]
    if after == carry:
      return carry
    carry = after


_RULES = {
  "dot_general": _contraction,
  "ragged_dot_general": _contraction,
  "conv_general_dilated": _contraction,
  "gather": _lookup,
  "dynamic_slice": _lookup,
  "call": _call,
  "remat": _call,
  "shard_map": _call,
  "custom_jvp": _custom_rule,
  "custom_vjp": _custom_rule,
  "cond": _cond,
  "while": _while,
  "scan": _scan,
}
