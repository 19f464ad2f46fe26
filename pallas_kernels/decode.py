"""Decode kernel: packed codes and scales to BF16 or E4M3.

Bytes an element: 0.5 + 1/16 read, 2 written (1 for E4M3).
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
CHUNKS = (4, 2, 1)  # chunks of 64 blocks that a program may take
UNROLL = 4  # chunks in flight


def decode(codes, scales, *, dtype=jnp.bfloat16, interpret=None):
  """Codes times block scales, exact in BF16.

  Args:
    codes: uint8 [m, k / 2], two codes a byte; k a multiple of 16, and m k at
      least 1024.
    scales: uint8 [m, k / 16] E4M3 codes.
    dtype: bfloat16, float32, or float8_e4m3fn for scales of the restricted
      grid, whose products are E4M3 numbers.
    interpret: ``compat.interpret_params()`` on a CPU.

  Returns:
    [m, k] of ``dtype``.

  Raises:
    ValueError: for other sizes.
  """
  m, k = codes.shape[0], 2 * codes.shape[1]
  registers.check_size(m, k)
  half, lanes = registers.BLOCK // 2, registers.LANES
  n = m * k // BLOCK
  if k % BLOCK or 2 * n < lanes:
    raise ValueError(
      f"decode: codes of [{m}, {k}] need k % 16 == 0 and m k >= 1024; pad them"
      " with zeros."
    )
  tile = registers.Halves(interpret is not None)
  chunks = -(-2 * n // lanes)
  steps = next(c for c in CHUNKS if chunks % c == 0)
  unroll = min(UNROLL, steps)

  def decode_kernel(codes_ref, scales_ref, out_ref):
    program = lax.axis_index("program")

    def step(i, _):
      first = program * steps + i * unroll
      starts = [
        registers.start(first + u, lanes, 2 * n, chunks) for u in range(unroll)
      ]
      places = [pl.ds(start, lanes) for start in starts]
      loaded = []
      for start, place in zip(starts, places, strict=True):
        blocks = pl.ds(start // 2, lanes // 2)
        words = tile.load_codes(codes_ref.at[place])
        loaded.append((words, tile.load_scales(scales_ref.at[blocks])))
      for place, (words, code) in zip(places, loaded, strict=True):
        scale = lax.bitcast_convert_type(code, jnp.float8_e4m3fn)
        values = arithmetic.decode(tile, words, scale.astype(jnp.float32))
        compat.store(out_ref.at[place], values.astype(dtype))
      return ()

    lax.fori_loop(0, steps // unroll, step, ())

  out = plgpu.kernel(
    decode_kernel,
    out_type=jax.ShapeDtypeStruct((2 * n, half), dtype),
    grid=(chunks // steps,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )(codes.reshape(2 * n, half // 2), scales.reshape(n))
  return out.reshape(m, k)
