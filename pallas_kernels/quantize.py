"""Quantise kernels: blocks along rows, along columns, and both in one read.

Bytes an element of a BF16 operand: 2 read, and 0.5 + 1/16 written a direction;
a direction decoded to BF16 writes 2 more. Both directions read the operand once
from device memory and once more from the L2 cache.

Tiles go from device memory to registers and back, without shared memory: a
lane holds whole blocks, so nothing is exchanged. README.md has the roofline of
each kernel and what was measured.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import ClassVar
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import arithmetic
from pallas_kernels import compat
from pallas_kernels import registers

BLOCK = registers.BLOCK
ROW_CHUNKS = (4, 2, 1)  # chunks of 128 blocks that a program may take
ROW_UNROLL = {"rne": 1, "sr": 2}  # chunks in flight
COLUMN_TILES = (2, 1)  # tiles side by side that a program may take
COLUMN_UNROLL = {"rne": 2, "sr": 1}  # tiles in flight, where rows are not

Config = arithmetic.Config


class Operand(NamedTuple):
  """One direction of an operand that is to be quantised.

  Attributes:
    config: what is computed.
    scalars: float32 [4], see ``arithmetic.quantize``.
    stream: uint32 [6] for stochastic rounding: two words of the key, loop
      counter, batch element; row of codes and block of the first element, of a
      shard of a larger operand, else zeros.
    block_amax: float32 [m, k / 16] of blocks of several rows, negative where
      4/6 chose 4; for rows only.
    packed: whether codes and scales are wanted.
    decoded: dtype in which decoded values are wanted, or None; E4M3 holds those
      of the restricted grid exactly.
    tiled_scales: scales in the order of Blackwell's tensor cores, see
      ``tile_scales``.
  """

  config: Config
  scalars: Any
  stream: Any = None
  block_amax: Any = None
  packed: bool = True
  decoded: Any = None
  tiled_scales: bool = False


class Quantized(NamedTuple):
  """What a direction gives; None for what was not wanted.

  Attributes:
    codes: uint8, two codes a byte: [m, k / 2] of rows, [k, m / 2] of columns.
    scales: uint8 E4M3 codes, [m, k / 16] of rows, [k, m / 16] of columns; in
      the order of ``tile_scales`` where that was asked for.
    decoded: [m, k] codes times scales, of rows and of columns.
  """

  codes: Any
  scales: Any
  decoded: Any


def quantize(
  x,
  rows: Operand | None,
  columns: Operand | None,
  interpret=None,
  native: tuple[str, ...] = (),
):
  """Quantises an operand along its rows, its columns, or both.

  Args:
    x: [m, k] BF16 or float32. Rows need k a multiple of 16 and m k at least
      2048; columns need m a multiple of 16, k even, and that [m, k] holds one
      of ``registers.COLUMN_SHAPES``.
    rows: how blocks of sixteen neighbours are quantised.
    columns: how blocks of sixteen rows are.
    interpret: ``compat.interpret_params()`` on a CPU.
    native: what the GPU rounds to E2M1 by an instruction of its own, with the
      same bits: "rne" (compute capability 10.0 and later), "sr8" (10.x).

  Returns:
    A ``Quantized`` for each direction that was asked for.

  Raises:
    ValueError: for other sizes, or those whose addresses 32 bits do not hold;
      or nothing to do.
  """
  check(x, rows, columns)
  m, k = x.shape
  how = interpret is not None, native, rows is None or columns is None
  directions: list[_Direction] = []
  if columns is not None:
    directions.append(_Columns(columns, m, k, *how))
  if rows is not None:
    directions.append(_Rows(rows, m, k, *how))
  programs = directions[0].programs  # a tile of columns is two chunks of rows
  inputs = [d.inputs(x) for d in directions]
  outputs = [d.outputs() for d in directions]

  def kernel(*references):
    refs = list(references)
    program = lax.axis_index("program")
    sources = [[refs.pop(0) for _ in args] for args in inputs]
    targets = [[refs.pop(0) for _ in out] for out in outputs]
    for direction, source, target in zip(
      directions, sources, targets, strict=True
    ):
      direction.run(program, programs, source, target)

  kernel.__name__ = "_".join(["quantize", *(d.name for d in directions)])
  results = plgpu.kernel(
    kernel,
    out_type=tuple(o for out in outputs for o in out),
    grid=(programs,),
    grid_names=("program",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
    **({} if interpret is None else {"interpret": interpret}),
  )(*(a for args in inputs for a in args))
  arrays = list(results)
  quantised = [
    d.result([arrays.pop(0) for _ in out])
    for d, out in zip(directions, outputs, strict=True)
  ]
  return quantised[::-1]


def tile_scales(scales):
  """Block scales in the order that tcgen05 MMAs and cuBLAS read.

  Tiles of 128 rows and 4 blocks, 512 bytes each; of a tile's rows, 32 lie apart
  by 16 bytes, and the four of them that a row of 16 bytes holds by 32.

  Args:
    scales: uint8 [rows, blocks].

  Returns:
    uint8 [rows / 128, blocks / 4, 32, 16], both rounded up, padded with zeros.

  References:
    PTX ISA, "tcgen05 scale factor layouts", scale_vec::4X.
  """
  rows, blocks = scales.shape
  scales = jnp.pad(scales, ((0, -rows % 128), (0, -blocks % 4)))
  rows, blocks = scales.shape
  tiles = scales.reshape(rows // 128, 4, 32, blocks // 4, 4)
  return tiles.transpose(0, 3, 2, 1, 4).reshape(-1, blocks // 4, 32, 16)


def check(x, rows, columns):
  """Raises ValueError where the operand holds no tile, or broken blocks."""
  m, k = x.shape
  if rows is None and columns is None:
    raise ValueError("quantize: neither rows nor columns; give one of them.")
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(
      f"quantize: x has dtype {x.dtype}, needed bfloat16 or float32; cast it."
    )
  registers.check_size(m, k)
  if rows is not None and (k % BLOCK or m * k < registers.LANES * BLOCK):
    raise ValueError(
      f"quantize: rows of x[{m}, {k}] need k % 16 == 0 and m k >= 2048; pad x"
      " with zeros."
    )
  if columns is not None and registers.columns(m, k, False) is None:
    raise ValueError(
      f"quantize: columns of x[{m}, {k}] need m % 16 == 0, an even k, and sizes"
      f" of at least {' or '.join(map(str, registers.COLUMN_SHAPES))}; pad x"
      " with zeros."
    )


@dataclasses.dataclass
class _Direction:
  """One direction of a kernel: its arguments, its body, its results.

  Attributes:
    operand: what is asked for.
    m: rows of the operand.
    k: its columns.
    interpret: whether the kernel runs on a CPU.
    native: what the GPU rounds to E2M1 itself.
    alone: whether the kernel has no other direction.
  """

  operand: Operand
  m: int
  k: int
  interpret: bool
  native: tuple[str, ...]
  alone: bool

  programs: ClassVar[Any]
  """Programs that the direction is divided among."""

  axis: ClassVar[str]
  """What it is called."""

  @property
  def name(self) -> str:
    """In the name of the kernel, which profiles show."""
    config = self.operand.config
    parts = [self.axis, config.rounding if config.rounding == "sr" else ""]
    parts += ["rht" if config.signs is not None else ""]
    parts += ["46" if config.four_over_six else ""]
    return "_".join(part for part in parts if part)

  def view_shape(self) -> tuple[int, int]:
    """Of the operand as the kernel sees it."""
    raise NotImplementedError

  def packed_rows(self) -> tuple[int, int]:
    """Rows of the codes, and elements in a row."""
    raise NotImplementedError

  def packed_shapes(self) -> tuple:
    """Of codes and scales as the kernel writes them."""
    raise NotImplementedError

  def body(self, program, programs, x_ref, scalars, stream, amax_ref, out):
    """``program``'s share of the operand."""
    raise NotImplementedError

  def inputs(self, x) -> list:
    operand = self.operand
    args = [x.reshape(self.view_shape()), operand.scalars]
    if operand.config.rounding == "sr":
      key, place = operand.stream[:2], operand.stream[2:]
      words = jnp.concatenate([place, registers.round_keys(key)])
      args.append(lax.bitcast_convert_type(words, jnp.int32))
    if operand.block_amax is not None:
      args.append(operand.block_amax.reshape(-1))
    return args

  def outputs(self) -> list:
    operand, out = self.operand, []
    if operand.packed:
      out += [jax.ShapeDtypeStruct(s, jnp.uint8) for s in self.packed_shapes()]
    if operand.decoded is not None:
      out.append(jax.ShapeDtypeStruct(self.view_shape(), operand.decoded))
    return out

  def result(self, outputs: list) -> Quantized:
    operand, m, k = self.operand, self.m, self.k
    codes = scales = decoded = None
    if operand.packed:
      codes, scales = outputs.pop(0), outputs.pop(0)
      rows, width = self.packed_rows()
      codes = codes.reshape(rows, width // 2)
      scales = scales.reshape(rows, width // BLOCK)
      if operand.tiled_scales:
        scales = tile_scales(scales)
    if operand.decoded is not None:
      decoded = outputs.pop(0).reshape(m, k)
    return Quantized(codes, scales, decoded)

  def run(self, program, programs: int, source: Sequence, target: Sequence):
    """Reads what the references hold and runs the body."""
    operand = self.operand
    source, target = list(source), list(target)
    x_ref, scalars_ref = source.pop(0), source.pop(0)
    scalars = [scalars_ref[i] for i in range(4)]
    stream = amax_ref = codes_ref = scales_ref = decoded_ref = None
    if operand.config.rounding == "sr":
      stream_ref = source.pop(0)
      words = 4 + 2 * registers.ROUNDS
      stream = [stream_ref[i] for i in range(words)]
    if operand.block_amax is not None:
      amax_ref = source.pop(0)
    if operand.packed:
      codes_ref, scales_ref = target.pop(0), target.pop(0)
    if operand.decoded is not None:
      decoded_ref = target.pop(0)
    out = codes_ref, scales_ref, decoded_ref
    self.body(program, programs, x_ref, scalars, stream, amax_ref, out)

  def tile_of(self, tile, x, scalars, stream, block_amax, place, row):
    """Quantises one tile whose blocks lie at ``place`` of ``row``."""
    config = self.operand.config
    x = x.astype(jnp.float32)
    if config.signs is not None:
      x = tile.rht(x, config.signs)
    random = None
    if stream is not None:
      loop, batch, first_row, first_block, *keys = stream
      counter = place + first_block, row + first_row, batch, loop
      random = tile.random_bits(counter, keys, config.sr_bits)
    words, scale, parts = arithmetic.quantize(
      tile,
      x,
      scalars,
      config,
      block_amax,
      random,
      self.native if self.operand.decoded is None else (),
    )
    decoded = None
    if self.operand.decoded is not None:
      decoded = arithmetic.decoded(tile, x, *parts)
      decoded = decoded.astype(self.operand.decoded)
    return words, scale, decoded


class _Rows(_Direction):
  """Chunks of 128 blocks, in the order of memory."""

  axis = "rows"

  @property
  def blocks(self) -> int:
    return self.m * self.k // BLOCK

  @property
  def chunks(self) -> int:
    return -(-self.blocks // registers.LANES)

  @property
  def programs(self) -> int:
    chunks = self.chunks
    return chunks // next(c for c in ROW_CHUNKS if chunks % c == 0)

  def view_shape(self):
    return (self.blocks, BLOCK)

  def packed_rows(self):
    return self.m, self.k

  def packed_shapes(self):
    return (self.blocks, BLOCK // 2), (self.blocks,)

  def body(self, program, programs, x_ref, scalars, stream, amax_ref, out):
    tile = registers.Rows(interpret=self.interpret)
    codes_ref, scales_ref, decoded_ref = out
    blocks = self.k // BLOCK
    steps = -(-self.chunks // programs)
    parts = registers.LANES, self.blocks, steps * programs
    most = ROW_UNROLL[self.operand.config.rounding]
    unroll = max(u for u in range(1, most + 1) if steps % u == 0)

    def step(i, _):
      starts = [
        registers.start(program * steps + i * unroll + u, *parts)
        for u in range(unroll)
      ]
      places = [pl.ds(start, registers.LANES) for start in starts]
      loaded = [compat.load(x_ref.at[p], tile.layout) for p in places]
      for start, place, x in zip(starts, places, loaded, strict=True):
        block_amax = counter = row = None
        if amax_ref is not None:
          block_amax = compat.load(amax_ref.at[place], tile.block_layout)
        if stream is not None:
          block = tile.iota(0) + start
          counter, row = block % blocks, block // blocks
        words, scale, decoded = self.tile_of(
          tile, x, scalars, stream, block_amax, counter, row
        )
        if codes_ref is not None:
          compat.store(codes_ref.at[place], tile.codes(words))
          compat.store(scales_ref.at[place], scale.astype(jnp.uint8))
        if decoded_ref is not None:
          compat.store(decoded_ref.at[place], decoded)
      return ()

    lax.fori_loop(0, steps // unroll, step, ())


class _Columns(_Direction):
  """Tiles of up to four blocks of some columns, side by side."""

  axis = "columns"

  @property
  def tile(self) -> registers.Columns:
    tile = registers.columns(self.m, self.k, self.interpret)
    assert tile is not None  # check() was passed
    return tile

  @property
  def grid(self) -> tuple[int, int]:
    """Tiles, down and across."""
    rows, columns = self.tile.shape
    return -(-self.m // rows), -(-self.k // columns)

  @property
  def steps(self) -> int:
    return next(n for n in COLUMN_TILES if self.grid[1] % n == 0)

  @property
  def programs(self) -> int:
    down, across = self.grid
    return down * across // self.steps

  def view_shape(self):
    return (self.m, self.k)

  def packed_rows(self):
    return self.k, self.m

  def packed_shapes(self):
    return (self.k, self.m // 2), (self.k, self.m // BLOCK)

  def body(self, program, programs, x_ref, scalars, stream, amax_ref, out):
    del programs, amax_ref
    tile, steps = self.tile, self.steps
    codes_ref, scales_ref, decoded_ref = out
    (rows, columns), (tiles_down, tiles_across) = tile.shape, self.grid
    across = tiles_across // steps
    first = program % across * steps
    down, half = tile.down, BLOCK // 2
    parts = down, self.m // BLOCK, tiles_down
    block = registers.start(program // across, *parts)
    parts = columns, self.k, tiles_across
    most = COLUMN_UNROLL[self.operand.config.rounding] if self.alone else 1
    unroll = min(most, steps)

    def step(s, _):
      starts = [
        registers.start(first + s * unroll + u, *parts) for u in range(unroll)
      ]
      places = [
        (pl.ds(block * BLOCK, rows), pl.ds(start, columns)) for start in starts
      ]
      loaded = [compat.load(x_ref.at[p], tile.layout) for p in places]
      for start, place, x in zip(starts, places, loaded, strict=True):
        counter = row = None
        if stream is not None:
          counter, row = tile.iota(0) + block, tile.iota(1) + start
        words, scale, decoded = self.tile_of(
          tile, x, scalars, stream, None, counter, row
        )
        if codes_ref is not None:
          at = place[1], pl.ds(block * half, down * half)
          compat.store(codes_ref.at[at], tile.codes(words))
          at = place[1], pl.ds(block, down)
          compat.store(scales_ref.at[at], tile.scales(scale))
        if decoded_ref is not None:
          compat.store(decoded_ref.at[place], decoded)
      return ()

    lax.fori_loop(0, steps // unroll, step, ())
