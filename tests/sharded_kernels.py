"""The kernels' callers on eight CPU devices, twins in the kernels' place.

Run by test_sharding.py: XLA does not partition the kernels' interpreter. The
twins write down what they saw and where they were, in integers, so that a shard
which is told another's place, or sees a broken block, gives other bytes.
"""

from collectives import collectives
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from fp4jax import Operand
from fp4jax import Rht
from fp4jax import kernels
from fp4jax import rounding
from pallas_kernels import quantize as quantize_kernel

SCALARS = "f32[]", "f32[1]"  # the amax of an operand
FULL, ROWS, COLUMNS = P("a", "b"), P(("a", "b")), P(None, ("b", "a"))
SR = Operand(rounding="sr")
ROTATED = Operand(rht=Rht(), rounding="sr")
SQUARE = Operand(block=(16, 16), four_over_six=True)
STREAM = rounding.site_stream(jax.random.key(3), 5, 2, 7)
CASES = (  # rows, columns, shape, sharding, does the operand travel
  (SR, None, (256, 128), FULL, False),
  (SR, None, (96, 128), ROWS, False),  # blocks need no whole sixteen rows
  (SR, None, (96, 96), COLUMNS, True),  # 12 columns a shard
  (None, SR, (256, 128), FULL, False),
  (None, ROTATED, (96, 96), COLUMNS, False),
  (None, ROTATED, (96, 128), ROWS, True),  # 12 rows a shard
  (SR, ROTATED, (256, 128), FULL, False),
  (SR, ROTATED, (256, 96), COLUMNS, True),
  (SQUARE, None, (256, 128), FULL, False),
  (SQUARE, None, (96, 128), ROWS, True),
  (SQUARE, None, (256, 96), COLUMNS, True),
)


def quantize(x, rows, columns, interpret=None, native=()):
  """In place of the kernel: sums of elements, places and block amax."""
  del interpret, native
  results = []
  for operand, turned in ((rows, False), (columns, True)):
    if operand is None:
      continue
    y = x.astype(jnp.float32)
    y = y.T if turned else y
    if operand.stream is not None:
      row = lax.broadcasted_iota(jnp.uint32, y.shape, 0) + operand.stream[4]
      block = lax.broadcasted_iota(jnp.uint32, y.shape, 1) // 16
      block = block + operand.stream[5]
      y = y + (7 * row + 11 * block).astype(jnp.float32)
    if operand.block_amax is not None:
      y = y + 13 * jnp.repeat(operand.block_amax, 16, 1)
    pairs = y.reshape(y.shape[0], -1, 2)
    bytes_ = (
      3 * pairs[..., 0] + 5 * pairs[..., 1],
      y.reshape(y.shape[0], -1, 16).sum(-1),
    )
    results.append(
      quantize_kernel.Quantized(
        *((b % 251).astype(jnp.uint8) for b in bytes_),
        y.T if turned else y,
      )
    )
  return results


def errors(x, scalars, block_amax, config, *, axis=-1, interpret=None):
  """In place of the kernel: six or four has less error as elements have it."""
  del scalars, config, interpret
  m, k = x.shape
  x = x.astype(jnp.float32)
  if axis == -1:
    sums = x.reshape(m, k // 16, 16).sum(-1)
  else:
    sums = x.reshape(m // 16, 16, k).sum(1)
  return jnp.abs(sums + block_amax) % 5, jnp.abs(sums) % 3


def amax(x, *, signs=None, interpret=None):
  """In place of the kernel: the rotation's is twice the operand's."""
  del interpret
  own = jnp.abs(x).max().astype(jnp.float32)
  return own, None if signs is None else 2 * own


def quantised(x, rows, columns):
  """All that both directions give."""
  requests = [
    operand and kernels.Request(operand, True, jnp.bfloat16)
    for operand in (rows, columns)
  ]
  streams = [
    STREAM if operand is not None and operand.rounding == "sr" else None
    for operand in (rows, columns)
  ]
  return [
    (q.codes.codes, q.codes.scales, q.decoded, q.tensor_scale)
    for q in kernels.quantize(x, *requests, tuple(streams))
    if q is not None
  ]


def check(mesh, rows, columns, shape, spec, gathers):
  """A sharded operand gives the bytes of a whole one."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.integers(-8, 8, shape), jnp.float32).at[-1, -1].set(9)
  made = jax.jit(lambda x: quantised(x, rows, columns))
  want = jax.tree.leaves(made(x))
  sharded = jax.device_put(x, NamedSharding(mesh, spec))
  label = f"rows={rows} columns={columns} {shape} {spec}"
  for got, wanted in zip(jax.tree.leaves(made(sharded)), want, strict=True):
    np.testing.assert_array_equal(got, wanted, err_msg=label)

  def most(x):  # results may be gathered where no sharding describes them
    results = jax.tree.leaves(quantised(x, rows, columns))
    return [y.astype(jnp.float32).max() for y in results]

  text = jax.jit(most).lower(sharded).compile().as_text()
  travels = [
    moved for moved in collectives(text) if moved.split()[-1] not in SCALARS
  ]
  assert bool(travels) == gathers, (label, travels)


def main():
  assert jax.device_count() == 8
  kernels.quantize_kernel.quantize = quantize
  kernels.errors_kernel.errors = errors
  kernels.amax_kernel.amax = amax
  mesh = jax.make_mesh(
    (4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  for case in CASES:
    check(mesh, *case)
  print("done")


if __name__ == "__main__":
  main()
