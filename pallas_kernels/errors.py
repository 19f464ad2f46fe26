"""Errors of blocks with their amax at 6 and at 4, before one is chosen.

Where a block lies within one lane's elements the quantise kernels choose
themselves. Square blocks lie in sixteen rows, which no lane holds: their
errors, a row or a column each, are added up between this kernel and the
quantising one.

Bytes an element of a BF16 operand: 2 + 1/4 read, 1/2 written.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import arithmetic
from pallas_kernels import compat
from pallas_kernels import registers

BLOCK = registers.BLOCK
CHUNKS = (4, 2, 1)  # chunks of 128 blocks that a program may take


def errors(x, scalars, block_amax, config, *, axis: int = -1, interpret=None):
  """Squared errors of rows, or of columns, of blocks under either scale.

  Args:
    x: [m, k] BF16 or float32; k a multiple of 16 and m k at least 2048. For
      columns as of ``quantize.quantize``.
    scalars: float32 [4], see ``arithmetic.quantize``.
    block_amax: float32 [m, k / 16], the amax of the block that each sixteen
      elements are a row of; of columns [m / 16, k].
    config: an ``arithmetic.Config`` with nearest rounding.
    axis: along which sixteen elements are added up: -1 for rows, -2 for
      columns.
    interpret: ``compat.interpret_params()`` on a CPU.

  Returns:
    Two float32 of ``block_amax``'s shape, in units of the tensor scale: with
    the block's amax at 6, and at 4.

  Raises:
    ValueError: for other sizes.
  """
  if axis == -2:
    return _of_columns(x, scalars, block_amax, config, interpret)
  m, k = x.shape
  registers.check_size(m, k)
  lanes = registers.LANES
  n = m * k // BLOCK
  if k % BLOCK or n < lanes:
    raise ValueError(
      f"errors: x[{m}, {k}] needs k % 16 == 0 and m k >= 2048; pad it with"
      " zeros."
    )
  tile = registers.Rows(interpret=interpret is not None)
  chunks = -(-n // lanes)
  steps = next(c for c in CHUNKS if chunks % c == 0)

  def errors_rows(*refs):
    program = lax.axis_index("program")

    def step(i, _):
      start = registers.start(program * steps + i, lanes, n, chunks)
      place = pl.ds(start, lanes)
      _of_tile(tile, config, refs, place, place)
      return ()

    lax.fori_loop(0, steps, step, ())

  arrays = x.reshape(n, BLOCK), scalars, block_amax.reshape(n)
  out = _launch(errors_rows, chunks // steps, interpret, *arrays)
  return tuple(e.reshape(m, k // BLOCK) for e in out)


def _of_columns(x, scalars, block_amax, config, interpret):
  """``errors`` along the first axis."""
  m, k = x.shape
  registers.check_size(m, k)
  tile = registers.columns(m, k, interpret is not None)
  if tile is None:
    raise ValueError(
      f"errors: columns of x[{m}, {k}] need m % 16 == 0, an even k, and sizes"
      f" of at least {' or '.join(map(str, registers.COLUMN_SHAPES))}; pad x"
      " with zeros."
    )
  (rows, columns), down = tile.shape, tile.down
  grid = -(-m // rows), -(-k // columns)

  def errors_columns(*refs):
    program = lax.axis_index("program")
    block = registers.start(program // grid[1], down, m // BLOCK, grid[0])
    start = registers.start(program % grid[1], columns, k, grid[1])
    across = pl.ds(start, columns)
    place = pl.ds(block * BLOCK, rows), across
    _of_tile(tile, config, refs, place, (pl.ds(block, down), across))

  programs = grid[0] * grid[1]
  return _launch(errors_columns, programs, interpret, x, scalars, block_amax)


def _of_tile(tile, config, refs, place, blocks):
  """Errors of one tile, whose elements lie at ``place``."""
  x_ref, scalars_ref, amax_ref, six_ref, four_ref = refs
  scalars = [scalars_ref[i] for i in range(4)]
  x = compat.load(x_ref.at[place], tile.layout).astype(jnp.float32)
  block_amax = compat.load(amax_ref.at[blocks], tile.block_layout)
  six, four = arithmetic.errors(tile, x, scalars, config, block_amax)
  compat.store(six_ref.at[blocks], six)
  compat.store(four_ref.at[blocks], four)


def _launch(kernel, programs: int, interpret, x, scalars, block_amax):
  out = jax.ShapeDtypeStruct(block_amax.shape, jnp.float32)
  return plgpu.kernel(
    kernel,
    out_type=(out, out),
    grid=(programs,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )(x, scalars, block_amax)
