"""Errors of blocks with their amax at 6 and at 4, before one is chosen.

Where a block lies within one lane's elements the quantise kernels choose
themselves. Square blocks lie in sixteen rows, which no lane holds: their
errors, a row each, are added up between this kernel and the quantising one.

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


def errors(x, scalars, block_amax, config, interpret=None):
  """Squared errors of rows of blocks under either scale.

  Args:
    x: [m, k] BF16 or float32; k a multiple of 16 and m k at least 2048.
    scalars: float32 [4], see ``arithmetic.quantize``.
    block_amax: float32 [m, k / 16], the amax of the block that each sixteen
      elements are a row of.
    config: an ``arithmetic.Config`` with nearest rounding.
    interpret: ``compat.interpret_params()`` on a CPU.

  Returns:
    Two float32 [m, k / 16] in units of the tensor scale: with the block's amax
    at 6, and at 4.

  Raises:
    ValueError: for other sizes.
  """
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

  def errors_kernel(x_ref, scalars_ref, amax_ref, six_ref, four_ref):
    program = lax.axis_index("program")
    scalars = [scalars_ref[i] for i in range(4)]

    def step(i, _):
      start = registers.start(program * steps + i, lanes, n, chunks)
      place = pl.ds(start, lanes)
      x = compat.load(x_ref.at[place], tile.layout).astype(jnp.float32)
      block_amax = compat.load(amax_ref.at[place], tile.block_layout)
      six, four = arithmetic.errors(tile, x, scalars, config, block_amax)
      compat.store(six_ref.at[place], six)
      compat.store(four_ref.at[place], four)
      return ()

    lax.fori_loop(0, steps, step, ())

  out = plgpu.kernel(
    errors_kernel,
    out_type=(jax.ShapeDtypeStruct((n,), jnp.float32),) * 2,
    grid=(chunks // steps,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )(x.reshape(n, BLOCK), scalars, block_amax.reshape(n))
  return tuple(e.reshape(m, k // BLOCK) for e in out)
