"""Functions that run on shards, on eight CPU devices.

Contract: ``sharding.shardable`` gives the numbers of one device, whatever the
mesh and the sharding; nothing of the operand travels where the shards hold
whole blocks; and each shard knows its place.
"""

import os
import subprocess
import sys

SCRIPT = """
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np

from fp4jax import sharding

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


def moved(compiled):
  '''Sizes of what collectives give, by kind.'''
  found = re.findall(
    r"= (\\S+) (all-gather|all-reduce|all-to-all|collective-permute|"
    r"reduce-scatter)(?:-start)?\\(", compiled.as_text())
  return [(kind, shape) for shape, kind in found]


assert jax.device_count() == 8
mesh = jax.make_mesh(
  (4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
)
rng = np.random.default_rng(0)
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
  f = jax.jit(sharding.shardable(function, ARGS, OUTS, "mk"))
  xs = jax.device_put(x, NamedSharding(mesh, spec))
  compiled = f.lower(xs, scalars).compile()
  for got, wanted, labels in zip(compiled(xs, scalars), want, OUTS):
    wanted = np.asarray(wanted)
    if labels == "b" and not spec == P():
      wanted = np.where(np.isnan(wanted), np.inf, wanted)
    np.testing.assert_array_equal(got, wanted, err_msg=f"{shape} {spec}")
    if not gathers:
      axes = {axis for axis, names in zip("bmk", spec) if names}
      divided = got.sharding.shard_shape(got.shape) != got.shape
      assert divided == any(a in labels for a in axes), (labels, got.sharding)
  scalar = re.compile(r"f32\\[\\d?\\].*")  # the amax of a batch element
  tensors = [m for m in moved(compiled) if not scalar.fullmatch(m[1])]
  assert bool(tensors) == gathers, (shape, spec, moved(compiled))
print("done")
"""


def test_shards_give_the_numbers_of_one_device():
  flags = "--xla_force_host_platform_device_count=8"
  done = subprocess.run(
    [sys.executable, "-c", SCRIPT],
    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.strip().endswith("done")
