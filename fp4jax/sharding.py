"""Functions of an operand that run on each of its shards.

XLA's partitioner does not see into a kernel: left to itself it gathers what the
kernel reads on every device. ``shardable`` tells it how the axes of arguments
and results belong together, and what a shard has to know of its place.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import custom_partitioning
import jax.numpy as jnp
import numpy as np

from fp4jax import _jax
from fp4jax import scaling

BLOCK = 16
_AXES = "bmk"


class Shard(NamedTuple):
  """The place of a shard in its operand.

  Attributes:
    row: uint32 index of its first row.
    column: uint32 index of its first column.
  """

  row: Any = 0
  column: Any = 0


def shardable(
  function: Callable, args: Sequence[str], outs: Sequence[str], whole: str = ""
) -> Callable:
  """A function of arrays that several devices evaluate shard by shard.

  Args:
    function: of a ``Shard`` and of arrays, to a tuple of arrays. Holds no array
      besides.
    args: the axes of each argument: b for batch elements, m for rows, k for
      columns of the operand, k/2 where an element stands for two; "." for an
      axis that is never divided. The first has b, m and k, in this order.
    outs: the same of the results. Of one that has no m and k, which are then
      magnitudes, the largest of all shards is taken.
    whole: axes of which only whole blocks of sixteen are divided; a sharding
      that does otherwise is given up, and the axis gathered.

  Returns:
    A function of the arrays. How they are sharded is XLA's to say (an auto
    mesh), also where one axis of a mesh divides two of an array; axes that are
    sharded unevenly are gathered.
  """
  if _jax.device_count() == 1:
    return lambda *arrays: function(Shard(), *arrays)
  call = custom_partitioning.custom_partitioning(
    lambda *arrays: function(Shard(), *arrays)
  )

  def partition(mesh, arg_infos, result_infos):
    del result_infos
    x = arg_infos[0]
    mesh, spec = decoded(x.sharding, len(x.shape), tuple(mesh.shape.values()))
    axes = _axes(mesh, spec, _sizes(x.shape, args[0]), whole)

    def shard(*arrays):
      sizes = dict(zip(_AXES, _sizes(arrays[0].shape, args[0]), strict=True))
      row, column = (
        _index(mesh, axes[axis]) * jnp.uint32(sizes[axis]) for axis in "mk"
      )
      results = function(Shard(row, column), *arrays)
      divided = axes["m"] + axes["k"]
      return tuple(
        # Inf for NaN, which collectives drop.
        lax.pmax(scaling.magnitude(x), divided)
        if divided and labels == "b"
        else x
        for x, labels in zip(results, outs, strict=True)
      )

    given, made = (
      tuple(_named(mesh, axes, labels) for labels in side)
      for side in (args, outs)
    )
    return mesh, shard, made, given

  call.def_partition(
    partition=partition,
    sharding_rule=_rule(args, outs),
    decode_shardings=False,  # JAX fails where an axis of a mesh is divided
  )
  return call


def decoded(sharding, rank: int, mesh_shape: Sequence[int] = ()):
  """A sharding in terms of a mesh whose axes are as small as can be.

  Args:
    sharding: of an array.
    rank: how many axes the array has.
    mesh_shape: of the mesh that the sharding comes from, where there is one.

  Returns:
    A mesh of the devices in the sharding's order, each of its axes a prime
    factor of one of ``mesh_shape``; and names of those that divide each axis of
    the array, the slowest first. None are named of an axis that is divided
    across these factors.
  """
  count = len(sharding.device_set)
  # Of this shape any sharding of the devices is even.
  places = sharding.devices_indices_map((count,) * rank)
  sizes = [p for n in mesh_shape or (count,) for p in _primes(n)]
  names = [f"axis{i}" for i in range(len(sizes))]
  mesh = jax.sharding.Mesh(np.array([*places]).reshape(sizes), names)
  digits = np.indices(sizes).reshape(len(sizes), count)
  strides = np.array([math.prod(sizes[i + 1 :]) for i in range(len(sizes))])
  spec = []
  for axis in range(rank):
    starts = [place[axis].start or 0 for place in places.values()]
    _, index = np.unique(starts, return_inverse=True)
    weights = index[strides]  # of a device that is the first along all but one
    order = [i for i in np.argsort(-weights, kind="stable") if weights[i]]
    radix = [
      math.prod(sizes[j] for j in order[n + 1 :]) for n in range(len(order))
    ]
    regular = np.array_equal(weights[order], radix)
    if not regular or not np.array_equal(weights @ digits, index):
      order = []
    spec.append(tuple(names[i] for i in order))
  return mesh, spec


def _primes(n: int) -> list[int]:
  """Prime factors, the smallest first.

  >>> _primes(12)
  [2, 2, 3]
  """
  found, factor = [], 2
  while n > 1:
    while n % factor == 0:
      found.append(factor)
      n //= factor
    factor += 1
  return found


def _axes(mesh, spec, sizes, whole: str) -> dict[str, tuple[str, ...]]:
  """The mesh axes that divide batch, rows and columns."""
  found = {}
  for axis, size, names in zip(_AXES, sizes, spec, strict=True):
    shards = math.prod(mesh.shape[name] for name in names)
    unit = BLOCK if axis in whole else 1
    found[axis] = names if size % (shards * unit) == 0 else ()
  return found


def _sizes(shape, labels: str) -> list[int]:
  """The operand's sizes, from those of an argument."""
  return [
    size * _divisor(label)
    for size, label in zip(shape, labels.split(), strict=True)
  ]


def _divisor(label: str) -> int:
  """Elements of the operand to one of an axis."""
  return int(label.partition("/")[2] or 1)


def _index(mesh, names: tuple[str, ...]):
  """The number of a shard among those of an axis, uint32."""
  index = jnp.uint32(0)
  for name in names:
    index = index * jnp.uint32(mesh.shape[name])
    index = index + lax.axis_index(name).astype(jnp.uint32)
  return index


def _named(mesh, axes, labels: str):
  """The sharding of an array of such axes."""
  spec = (axes.get(label[0], ()) or None for label in labels.split())
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def _rule(args, outs) -> str:
  """Shardy's rule: axes of one letter are divided alike, whatever their sizes.

  >>> _rule(["b m k", "b ."], ["b m k/2", "b k"])
  'b m k, b o -> b m k, b k'
  """
  others = iter("opqrstuv")

  def spelled(labels):
    letters = (label[0] for label in labels.split())
    return " ".join(next(others) if a == "." else a for a in letters)

  sides = (", ".join(map(spelled, side)) for side in (args, outs))
  return " -> ".join(sides)
