"""Functions that run on shards, on eight CPU devices.

Contract: ``sharding.shardable`` gives the numbers of one device, whatever the
mesh and the sharding; nothing of the operand travels where the shards hold
whole blocks, also where one axis of the mesh divides two of the operand; and
each shard knows its place.
"""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re
import sys

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from fp4jax import sharding

sys.path.append("tests")
from collectives import collectives

ARGS = ["b m k", "b ."]
OUTS = ["b m k/2", "b m k/16", "b k m/2", "b k m/16", "b m k", "b"]


def function(shard, x, scalars):
  '''Of elements' values and places, in every layout that results have.'''
  x = x * scalars[:, 0, None, None]
  row = lax.broadcasted_iota(jnp.uint32, x.shape, 1) + shard.row
  column = lax.broadcasted_iota(jnp.uint32, x.shape, 2) + shard.column
  y = x + (1000 * row + column).astype(jnp.float32)
  b, m, k = x.shape
  down = jnp.swapaxes(y, 1, 2)
  return (
    y.reshape(b, m, k // 2, 2).sum(-1),
    y.reshape(b, m, k // 16, 16).sum(-1),
    down.reshape(b, k, m // 2, 2).sum(-1),
    down.reshape(b, k, m // 16, 16).sum(-1),
    y,
    jnp.where(jnp.isnan(x).any((1, 2)), jnp.nan, jnp.abs(x).max((1, 2))),
  )


assert jax.device_count() == 8
mesh = jax.make_mesh(
  (4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
rng = np.random.default_rng(0)
scalar = re.compile(r"\\S+ f32\\[\\d?\\]")  # the amax of a batch element


def check(f, xs, scalars, want, label):
  '''The numbers of one device; returns the tensors that travel.'''
  compiled = jax.jit(f).lower(xs, scalars).compile()
  for got, wanted, labels in zip(compiled(xs, scalars), want, OUTS):
    wanted = np.asarray(wanted)
    if labels == "b" and xs.sharding.spec != P():
      wanted = np.where(np.isnan(wanted), np.inf, wanted)
    np.testing.assert_array_equal(got, wanted, err_msg=label)
    yield labels, got
  travels = [m for m in collectives(compiled.as_text())
             if not scalar.fullmatch(m)]
  yield "travels", travels


for shape, spec, gathers in (
  ((2, 256, 128), P(None, "a", "b"), False),
  ((2, 256, 128), P(None, ("a", "b"), None), False),
  ((2, 256, 128), P("b", None, "a"), False),
  ((2, 256, 256), P(None, None, ("b", "a")), False),
  ((1, 256, 128), P(), False),
  ((1, 96, 128), P(None, "a", "b"), True),  # 24 rows a shard: no whole blocks
  ((1, 256, 96), P(None, None, ("a", "b")), True),
):
  x = rng.integers(-8, 8, shape).astype(np.float32)
  scalars = np.full((shape[0], 4), 2, np.float32)
  x[-1, -1, -1] = np.nan if shape[-1] == 256 else 31
  want = function(sharding.Shard(), x, scalars)
  f = sharding.shardable(function, ARGS, OUTS, "mk")
  xs = jax.device_put(x, NamedSharding(mesh, spec))
  *results, (_, travels) = check(f, xs, scalars, want, f"{shape} {spec}")
  assert bool(travels) == gathers, (shape, spec, travels)
  if not gathers:
    axes = {axis for axis, names in zip("bmk", spec) if names}
    for labels, got in results:
      divided = got.sharding.shard_shape(got.shape) != got.shape
      assert divided == any(a in labels for a in axes), (labels, got.sharding)

# One axis of the mesh divides two of the operand.
x = rng.integers(-8, 8, (512, 128)).astype(np.float32)
for shape, spec in (
  ((2, 256, 128), P("a")), ((2, 256, 128), P(("a", "b"))),
  ((8, 64, 128), P("a", "b")), ((1, 512, 128), P(("b", "a"))),
):
  scalars = np.full((shape[0], 4), 2, np.float32)
  want = function(sharding.Shard(), x.reshape(shape), scalars)
  f = sharding.shardable(function, ARGS, OUTS, "mk")
  xs = jax.device_put(x, NamedSharding(mesh, spec))
  divided = lambda x, scalars: f(x.reshape(shape), scalars)
  list(check(divided, xs, scalars, want, f"{shape} {spec}"))
  # No such sharding leaves a program: its results may be gathered.
  most = lambda *args: [y.max() for y in divided(*args)]
  travels = collectives(jax.jit(most).lower(xs, scalars).compile().as_text())
  assert all(map(scalar.fullmatch, travels)), (shape, spec, travels)

# Whatever the sharding, what it is decoded to is the same one.
meshes = {(4, 2): ("a", "b"), (8,): ("a",), (2, 2, 2): ("a", "b", "c")}
for sizes, names in meshes.items():
  mesh = jax.make_mesh(
    sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
  )
  for spec in (P(), P("a"), P(None, names), P(names[::-1]), P(None, "a")):
    given = NamedSharding(mesh, spec)
    for shape in (sizes, ()):
      small, parts = sharding.decoded(given, 2, shape)
      made = NamedSharding(small, P(*(part or None for part in parts)))
      assert made.is_equivalent_to(given, 2), (sizes, spec, parts)
print("done")
"""


@pytest.mark.parametrize("script", ["-c", "tests/sharded_kernels.py"])
def test_shards_give_the_numbers_of_one_device(script):
  """Of any function, and of the kernels' callers with twins in their place."""
  flags = "--xla_force_host_platform_device_count=8"
  done = subprocess.run(
    [sys.executable, script, *([SCRIPT] if script == "-c" else [])],
    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.strip().endswith("done")
