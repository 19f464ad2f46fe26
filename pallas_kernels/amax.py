"""Amax of an operand and of its rotation, in one read.

Bytes an element of a BF16 operand: 2 read. Every program keeps a maximum a
lane and writes it once; XLA reduces those.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels import registers

PROGRAMS = 528  # four for each multiprocessor of an H200
UNROLL = 4  # tiles in flight


def amax(x, *, signs: int | None = None, interpret=None):
  """Largest magnitudes of an operand and of its rotation along columns.

  Args:
    x: [m, k] BF16 or float32, m a multiple of 16, k even, that holds one of
      ``registers.COLUMN_SHAPES``.
    signs: sign bits of the rotation; None without one.
    interpret: ``compat.interpret_params()`` on a CPU.

  Returns:
    The operand's own amax and that of its rotation, None without one: float32
    scalars. NaN and Inf propagate.

  Raises:
    ValueError: for other sizes.
  """
  m, k = x.shape
  registers.check_size(m, k)
  tile = registers.columns(m, k, interpret is not None, downs=(1, 2, 4))
  if tile is None:
    raise ValueError(
      f"amax: x[{m}, {k}] needs m % 16 == 0, an even k, and sizes of at least"
      f" {' or '.join(map(str, registers.COLUMN_SHAPES))}; pad x with zeros."
    )
  rows, columns = tile.shape
  down, across = -(-m // rows), -(-k // columns)
  tiles = down * across
  programs = min(PROGRAMS, tiles)
  steps = -(-tiles // programs)
  unroll = min(UNROLL, steps)
  steps = -(-steps // unroll)
  count = 1 if signs is None else 2

  def amax_kernel(x_ref, *outs):
    program = lax.axis_index("program")

    def step(s, maxima):
      loaded = []
      for u in range(unroll):
        # The last tile again where there is none: no maximum minds.
        n = jnp.minimum((s * unroll + u) * programs + program, tiles - 1)
        i = registers.start(n // across, rows, m, down)
        j = registers.start(n % across, columns, k, across)
        place = pl.ds(i, rows), pl.ds(j, columns)
        loaded.append(compat.load(x_ref.at[place], tile.layout))
      for x in loaded:
        x = x.astype(jnp.float32)
        values = [x]
        if signs is not None:
          values.append(tile.rht(x, signs, rounded=False))
        maxima = tuple(
          jnp.maximum(most, tile.amax_pattern(v))
          for most, v in zip(maxima, values, strict=True)
        )
      return maxima

    zeros = (tile.constant(jnp.int32(0)),) * count
    maxima = lax.fori_loop(0, steps, step, zeros)
    for out, most in zip(outs, maxima, strict=True):
      compat.store(out.at[program], most)

  outs = plgpu.kernel(
    amax_kernel,
    out_type=(jax.ShapeDtypeStruct((programs, *tile.block_shape), jnp.int32),)
    * count,
    grid=(programs,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )(x)
  own, *rotated = (
    lax.bitcast_convert_type(jnp.max(most), jnp.float32) for most in outs
  )
  if not rotated:
    return own, None
  # Rounding keeps the order: once is enough.
  return own, lax.reduce_precision(rotated[0] * 0.25, 8, 7)
