"""What the transformation needs to know about jaxprs, in one place.

Everything that has differed between JAX versions, or has no documented name, is
reached here and nowhere else; tests run on the oldest and the newest supported
JAX.
"""

import contextlib
import dataclasses
import functools
import inspect
from typing import Any

import jax
from jax.experimental import xla_metadata
from jax.extend import core
from jax.extend import source_info_util
import jax.numpy as jnp

CONTRACTIONS = frozenset(
  {"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"}
)
_INLINE = frozenset(
  {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
  }
)
_REMAT = frozenset({"remat", "remat2", "checkpoint"})


def is_literal(atom) -> bool:
  """Whether an input of an equation is a literal."""
  return isinstance(atom, core.Literal)


def open_jaxpr(jaxpr):
  """The jaxpr with named constants, and their values."""
  return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def closure(traced) -> tuple[list, list]:
  """What a ``jax.stages.Traced`` captured: constants, and traced values.

  Traced values (of a ``jit`` or ``grad`` around) are the first inputs of its
  jaxpr.
  """
  everything, _ = traced.closure_convert()
  count = len(open_jaxpr(traced.jaxpr)[1])
  return everything[:count], everything[count:]


def kind(eqn) -> str:
  """What an equation is: a primitive's name, one name a concept."""
  name = eqn.primitive.name
  if name in _REMAT:
    return "remat"
  if name in _INLINE:
    return "call"
  if name == "ragged_dot":
    return "ragged_dot_general"
  if name in ("custom_vjp_call_jaxpr", "custom_vjp_call"):
    return "custom_vjp"
  if name == "custom_jvp_call":
    return "custom_jvp"
  return name


def sub_jaxprs(eqn) -> list:
  """The jaxprs among an equation's parameters."""
  found: list = []
  for value in eqn.params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if isinstance(item, (core.Jaxpr, core.ClosedJaxpr)):
        found.append(item)
  return found


def holds_contraction(jaxpr) -> bool:
  """Whether a contraction stands in a jaxpr or in one inside it."""
  return any(
    eqn.primitive.name in CONTRACTIONS
    or any(map(holds_contraction, sub_jaxprs(eqn)))
    for eqn in open_jaxpr(jaxpr)[0].eqns
  )


def call_jaxpr(eqn):
  """The one jaxpr that a call-like equation runs."""
  params = eqn.params
  return params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]


@dataclasses.dataclass(frozen=True)
class Scan:
  """A scan equation's body and how its operands divide."""

  body: Any
  consts: int
  carry: int
  length: int
  reverse: bool
  unroll: int


def scan(eqn) -> Scan:
  """Reads a scan equation."""
  params = eqn.params
  if "ft_in" in params:
    consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
  else:
    consts, carry = params["num_consts"], params["num_carry"]
  return Scan(
    params["jaxpr"],
    consts,
    carry,
    params["length"],
    params["reverse"],
    params["unroll"],
  )


def is_float(aval) -> bool:
  """Whether an array type holds real floats."""
  return jnp.issubdtype(aval.dtype, jnp.floating)


def name_stack(eqn) -> str:
  """The name stack of an equation, such as linen's module path."""
  return str(eqn.source_info.name_stack)


@contextlib.contextmanager
def provenance(eqn):
  """Evaluates under an equation's own source line, names and context."""
  stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
  with (
    source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
    eqn.ctx.manager,
  ):
    yield


def bind(eqn, args) -> list:
  """Evaluates an equation as it is."""
  bound = eqn.primitive.get_bind_params(eqn.params)
  subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
  with provenance(eqn):
    out = eqn.primitive.bind(*subfuns, *args, **params)
  return list(out) if eqn.primitive.multiple_results else [out]


def varying_axes(*arrays) -> tuple[str, ...]:
  """The axes of a ``shard_map`` around over which arrays differ, in order."""
  varying: set = set()
  for x in arrays:
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
      varying |= set(aval.manual_axis_type.varying)
    else:  # JAX 0.11
      varying |= set(aval.vma)
  mesh = jax.sharding.get_abstract_mesh()
  return tuple(axis for axis in mesh.axis_names if axis in varying)


def default_device():
  """The device that computations without a placement run on."""
  device = jax.config.jax_default_device
  if device is None:
    return jax.devices()[0]
  return jax.devices(device)[0] if isinstance(device, str) else device


def mesh_axes(kind: str) -> tuple[str, ...]:
  """The axes of the mesh around that are "Manual", "Explicit" or "Auto"."""
  mesh = jax.sharding.get_abstract_mesh()
  axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return tuple(name for name, type_ in axes if type_.name == kind)


def divided_explicitly(*arrays) -> tuple[str, ...]:
  """The explicit axes of a mesh that divide arrays, as their types say."""
  found = []
  for x in arrays:
    sharding: Any = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or sharding.mesh.empty:
      continue
    axes = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    explicit = {name for name, kind in axes if kind.name == "Explicit"}
    for names in sharding.spec:
      names = names if isinstance(names, tuple) else (names,)
      found += [name for name in names if name in explicit]
  return tuple(dict.fromkeys(found))


def device_count() -> int:
  """Devices of the default device's platform in this process and others."""
  return default_device().client.device_count()


def compiles_units() -> bool:
  """Whether what ``compiled_once`` returns is compiled apart.

  On one CPU alone: XLA's partitioner does not see into a unit.
  """
  mesh = jax.sharding.get_abstract_mesh()
  alone = default_device().platform == "cpu" and device_count() == 1
  return alone and mesh.empty


def compiled_once(function):
  """Jits a function of arrays and static keywords, one compilation a shape.

  XLA inlines what a program calls and compiles every copy. Its CPU compiler
  leaves a ``compilation_unit`` as it is and compiles it once.
  """

  @functools.wraps(function)
  def call(*arrays, **static):
    part = functools.partial(function, **static)
    if compiles_units():
      unit = {"compilation_unit": function.__name__, "inlineable": "false"}
      part = xla_metadata.xla_metadata_call(part, **unit)
    return part(*arrays)

  static = inspect.getfullargspec(function).kwonlyargs
  return jax.jit(call, static_argnames=static)


def given_shardings(shardings) -> tuple | None:
  """A jit's shardings, or None where the user gave none."""
  named = [s if hasattr(s, "device_set") else None for s in shardings]
  return tuple(named) if any(s is not None for s in named) else None
