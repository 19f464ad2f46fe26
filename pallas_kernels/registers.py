"""Tiles of an operand, and the few instructions Pallas has no word for.

A kernel here works on tiles whose blocks of sixteen elements each lie in one
lane: along rows, sixteen neighbours in memory (``Rows``); along columns, one
element of each of sixteen rows, which the lanes read side by side
(``Columns``). What is done to a block then needs no other lane, and is written
once for both.

What is written in Mosaic has a twin in ``jax.numpy`` beside it. The twin runs
where a kernel is interpreted; on a GPU the tests hold the two together.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm
from jaxlib.mlir.dialects import math as math_dialect
from jaxlib.mlir.dialects import vector
import numpy as np

from pallas_kernels import compat

BLOCK = 16
LANES = 128  # of a warpgroup

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclasses.dataclass(frozen=True)
class Tile:
  """A tile of blocks of sixteen elements.

  Arrays come in two shapes: the tile's own, and one value a block.

  Attributes:
    interpret: whether the kernel runs on a CPU.
  """

  interpret: bool

  size = BLOCK  # elements of a block that lie in a lane

  @property
  def shape(self) -> tuple[int, int]:
    """Of the tile."""
    raise NotImplementedError

  @property
  def layout(self):
    """Of the tile."""
    raise NotImplementedError

  @property
  def block_shape(self) -> tuple[int, ...]:
    """Of one value a block."""
    raise NotImplementedError

  @property
  def block_layout(self):
    """Of one value a block."""
    raise NotImplementedError

  def split(self, x) -> list:
    """The sixteen elements of all blocks, one value a block (interpreted)."""
    raise NotImplementedError

  def merge(self, xs):
    """The inverse of ``split``."""
    raise NotImplementedError

  def constant(self, x):
    """One int32 scalar for every block."""
    x = jnp.broadcast_to(x, self.block_shape)
    return x if self.interpret else plgpu.layout_cast(x, self.block_layout)

  def iota(self, axis: int):
    """int32 index of each block along an axis of ``block_shape``."""
    layout = None if self.interpret else self.block_layout
    return plgpu.broadcasted_iota(
      jnp.int32, self.block_shape, axis, layout=layout
    )

  def spread(self, x):
    """One value a block to the tile."""

    def emit(x):
      return [x * self.size]

    def twin(x):
      return self.merge([x] * self.size)

    return self._blockwise(emit, twin, (x,), x.dtype, BLOCK)

  def amax(self, x):
    """Largest magnitude of each block; NaN propagates."""

    def emit(xs):
      xs = [math_dialect.absf(x) for x in xs]
      return [[functools.reduce(arith.maximumf, xs)]]

    def twin(x):
      return functools.reduce(jnp.maximum, map(jnp.abs, self.split(x)))

    return self._blockwise(emit, twin, (x,), jnp.float32, 1)

  def amax_pattern(self, x):
    """int32 patterns of the amax: they order like it, with NaN above all."""

    def emit(xs):
      i32 = _int(32)
      mask = _constant(0x7FFFFFFF, i32)
      xs = [arith.andi(arith.bitcast(i32, x), mask) for x in xs]
      return [[functools.reduce(arith.maxsi, xs)]]

    def twin(x):
      bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
      return functools.reduce(jnp.maximum, self.split(bits))

    return self._blockwise(emit, twin, (x,), jnp.int32, 1)

  def reciprocal(self, x):
    """1 / x of a value a block, nearest even; Pallas' own division is not."""

    def emit(x):
      f32 = ir.F32Type.get()
      return [[llvm.inline_asm(f32, [x[0]], "rcp.rn.f32 $0, $1;", "=f,f")]]

    return self._blockwise(emit, lambda x: 1.0 / x, (x,), jnp.float32, 1)

  def rht(self, x, signs: int, rounded: bool = True):
    """Rotates every block: signs, butterfly, 1/4 and rounding to BF16.

    Where it is not ``rounded``, it is not divided by four either.
    """

    def emit(xs):
      f32 = ir.F32Type.get()
      ys = [arith.negf(x) if signs >> i & 1 else x for i, x in enumerate(xs)]
      stride = 1
      while stride < BLOCK:
        for i in range(BLOCK):
          if not i & stride:
            a, b = ys[i], ys[i + stride]
            ys[i], ys[i + stride] = arith.addf(a, b), arith.subf(a, b)
        stride *= 2
      if not rounded:
        return [ys]
      quarter, i32 = _constant(0.25, f32), _int(32)
      asm = "cvt.rn.bf16x2.f32 $0, $2, $1;"  # one instruction rounds two
      out = []
      for i in range(0, BLOCK, 2):
        two = [arith.mulf(y, quarter) for y in ys[i : i + 2]]
        both = llvm.inline_asm(i32, two, asm, "=r,f,f")
        high = arith.andi(both, _constant(-65536, i32))
        for bits in (arith.shli(both, _constant(16, i32)), high):
          out.append(arith.bitcast(f32, bits))
      return [out]

    def twin(x):
      ys = [-v if signs >> i & 1 else v for i, v in enumerate(self.split(x))]
      stride = 1
      while stride < BLOCK:
        for i in range(BLOCK):
          if not i & stride:
            a, b = ys[i], ys[i + stride]
            ys[i], ys[i + stride] = a + b, a - b
        stride *= 2
      y = self.merge(ys)
      return lax.reduce_precision(y * 0.25, 8, 7) if rounded else y

    return self._blockwise(emit, twin, (x,), jnp.float32, BLOCK)

  def random_bits(self, counter, keys, bits: int):
    """uint32 tile of ``bits`` random bits an element, by Philox4x32-10.

    Args:
      counter: the block's place along the contraction axis and its row in the
        operand, an int32 for each block; batch element and loop counter, int32
        scalars.
      keys: the keys of all rounds, int32 scalars, see ``round_keys``.
      bits: 16 or 8.
    """
    draws = bits * BLOCK // 128  # of four words a block
    place, row, batch, loop = counter
    args = [place, row, *map(self.constant, (batch, loop, *keys))]
    per_word = 32 // bits

    def emit(place, row, *scalars):
      i32 = _int(32)
      batch, loop, *keys = (s[0] for s in scalars)
      out = []
      for draw in range(draws):
        group = arith.muli(place[0], _constant(draws, i32))
        group = arith.addi(group, _constant(draw, i32))
        counter = group, row[0], batch, loop
        for word in _philox4x32(_Mlir, counter, keys):
          for i in range(per_word):
            shifted = arith.shrui(word, _constant(bits * i, i32))
            out.append(arith.andi(shifted, _constant((1 << bits) - 1, i32)))
      return [out]

    def twin(*args):
      place, row, batch, loop, *keys = (x.astype(jnp.uint32) for x in args)
      out = []
      for draw in range(draws):
        counter = place * draws + draw, row, batch, loop
        for word in _philox4x32(_Jnp, counter, keys):
          for i in range(per_word):
            out.append(word >> (bits * i) & ((1 << bits) - 1))
      return self.merge(out)

    return self._blockwise(emit, twin, args, jnp.uint32, BLOCK)

  def pack(self, index, x):
    """Two uint32 words a block of eight 4-bit codes each, the first lowest.

    Args:
      index: uint32 tile; a code's magnitude is the sum, modulo 8, of bits 0 to
        2 and of bits 22 to 24.
      x: float32 tile, whose signs the codes take.
    """
    # Both fields of an index, added, in the three highest bits.
    fields = 2**29 + 2**7

    def emit(index, x):
      i32 = _int(32)
      asm = "shf.l.wrap.b32 $0, $1, $2, {};"  # the highest bits of $1 come in
      words = []
      for first in range(0, BLOCK, 8):
        word = _constant(0, i32)
        for i in reversed(range(first, first + 8)):
          high = arith.muli(index[i], _constant(fields, i32))
          sign = arith.bitcast(i32, x[i])
          for source, bits in ((sign, 1), (high, 3)):
            args = [source, word]
            word = llvm.inline_asm(i32, args, asm.format(bits), "=r,r,r")
        words.append([word])
      return words

    def twin(index, x):
      high = index * jnp.uint32(fields) >> 29
      sign = lax.bitcast_convert_type(x, jnp.uint32) >> 31
      codes = self.split(high | sign << 3)
      return [
        sum(code << 4 * i for i, code in enumerate(codes[first : first + 8]))
        for first in (0, 8)
      ]

    return self._blockwise(emit, twin, (index, x), [jnp.uint32] * 2, 1)

  def pack_native(self, x, random=None):
    """The codes of float32 values, rounded by Blackwell, in two words.

    To nearest, or stochastically with eight random bits an element.
    """
    if self.interpret:
      raise NotImplementedError("no CPU has the instruction")

    def nearest(x):
      steps = "".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, ${2 * i + 2}, ${2 * i + 1};"
        for i in range(4)
      )
      asm = f"{{.reg .b8 b<4>;{steps}mov.b32 $0, {{b0,b1,b2,b3}};}}"
      return llvm.inline_asm(_int(32), x, asm, "=r" + ",f" * 8)

    def stochastic(x, random):
      i32, halves = _int(32), []
      for first in (0, 4):
        bits = random[first]  # a byte an element, the first lowest
        for i in range(1, 4):
          shifted = _shifted(random[first + i], 8 * i)
          bits = arith.ori(bits, shifted)
        asm = "cvt.rs.satfinite.e2m1x4.f32 $0, {$1, $2, $3, $4}, $5;"
        args = [*reversed(x[first : first + 4]), bits]
        half = llvm.inline_asm(_int(16), args, asm, "=h,f,f,f,f,r")
        halves.append(arith.extui(i32, half))
      return arith.ori(halves[0], _shifted(halves[1], 16))

    def emit(x, *random):
      return [
        [
          stochastic(x[i : i + 8], random[0][i : i + 8])
          if random
          else nearest(x[i : i + 8])
        ]
        for i in (0, 8)
      ]

    args = (x,) if random is None else (x, random)
    return self._blockwise(emit, None, args, [jnp.uint32] * 2, 1)

  def unpack(self, words):
    """float32 tile of the E2M1 codes in words, eight a word."""

    def emit(*words):
      i32, f32 = _int(32), ir.F32Type.get()
      # Exponent and mantissa, where float32 has its own, are the value times
      # 2**-126, for subnormals as well.
      bias, out = _constant(2.0**126, f32), []
      for (word,) in words:
        for i in range(8):
          field = _shifted(word, 22 - 4 * i)
          field = arith.andi(field, _constant(7 << 22, i32))
          sign = _shifted(word, 28 - 4 * i)
          sign = arith.andi(sign, _constant(-(1 << 31), i32))
          value = arith.bitcast(f32, arith.ori(field, sign))
          out.append(arith.mulf(value, bias))
      return [out]

    def twin(*words):
      out = []
      for word in words:
        for i in range(8):
          code = word >> 4 * i & 15
          index = code & 7
          normal = _f32((index << 22) + jnp.uint32(126 << 23))
          small = jnp.where(index == 1, jnp.float32(0.5), jnp.float32(0.0))
          value = jnp.where(index < 2, small, normal)
          out.append(jnp.where(code >= 8, -value, value))
      return self.merge(out)

    return self._blockwise(emit, twin, words, jnp.float32, BLOCK)

  def sum(self, x):
    """Sums of the blocks: halves added, then halves again."""

    def emit(xs):
      while len(xs) > 1:
        half = len(xs) // 2
        pairs = zip(xs[:half], xs[half:], strict=True)
        xs = [arith.addf(a, b) for a, b in pairs]
      return [xs]

    def twin(x):
      xs = self.split(x)
      while len(xs) > 1:
        half = len(xs) // 2
        xs = [a + b for a, b in zip(xs[:half], xs[half:], strict=True)]
      return xs[0]

    return self._blockwise(emit, twin, (x,), jnp.float32, 1)

  def _blockwise(self, emit, twin, args, dtypes, size: int):
    """``emit`` on every block in turn, or ``twin`` on the whole arrays.

    Args:
      emit: lists of a block's scalars, sixteen or one an argument, to a list of
        such lists.
      twin: the same on arrays.
      args: tiles, or one value a block.
      dtypes: of the result, or of each result in a list.
      size: elements a block in the results, sixteen or one.
    """
    if self.interpret:
      return twin(*args)
    single = not isinstance(dtypes, list)
    dtypes = [dtypes] if single else dtypes
    value = self.block_shape, self.block_layout
    shape, layout = (self.shape, self.layout) if size == BLOCK else value

    @plgpu.inline_mgpu(
      arg_types=tuple(
        self.layout if a.shape == self.shape else self.block_layout
        for a in args
      ),
      return_type=[
        plgpu.ShapeDtypeStruct(shape, d, layout=layout) for d in dtypes
      ],
    )
    def run(ctx, *arrays):
      del ctx
      blocks = zip(*(self._blocks(a) for a in arrays), strict=True)
      results = zip(*(emit(*block) for block in blocks), strict=True)
      return [
        _array(
          self._registers(result, size),
          shape,
          layout,
          jnp.issubdtype(d, jnp.signedinteger)
          if jnp.issubdtype(d, jnp.integer)
          else None,
        )
        for result, d in zip(results, dtypes, strict=True)
      ]

    out = run(*args)
    return out[0] if single else out

  def _blocks(self, array) -> list[list]:
    """The scalars of each of the lane's blocks."""
    raise NotImplementedError

  def _registers(self, blocks, size: int) -> list:
    """The registers that hold such blocks."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Rows(Tile):
  """128 blocks of sixteen neighbours: [128, 16], a block a lane."""

  interpret: bool = False

  @property
  def shape(self):
    return (LANES, self.size)

  @property
  def layout(self):
    return self.matrix(self.size)

  def matrix(self, width: int):
    """Layout of [128, width], a row a lane."""
    return _tiled((LANES, width), (LANES // 4, width), warp=-4, lane=-2)

  @property
  def block_shape(self):
    return (LANES,)

  @property
  def block_layout(self):
    return self.layout.reduce(1)

  def split(self, x):
    return list(x.T)

  def merge(self, xs):
    return jnp.stack(xs, axis=-1)

  def codes(self, words):
    """Two uint32 words a block to uint8 [128, 8], the lowest byte first."""
    if self.interpret:
      parts = [w >> jnp.uint32(8 * i) & 0xFF for w in words for i in range(4)]
      return jnp.stack(parts, axis=-1).astype(jnp.uint8)
    return _relabelled(
      words,
      [self.block_layout] * 2,
      (LANES, BLOCK // 2),
      self.matrix(BLOCK // 2),
      jnp.uint8,
      _interleaved,
    )

  def _blocks(self, array):
    return [_elements(r) for r in array.registers.flat]

  def _registers(self, blocks, size):
    return [_vector(block) for block in blocks]


@dataclasses.dataclass(frozen=True)
class Halves(Rows):
  """64 blocks, half of one a lane: [128, 8].

  What a lane reads of codes, and writes of BF16 values, then lies next to what
  its neighbours do.
  """

  size = BLOCK // 2

  def load_codes(self, ref):
    """uint8 [128, 4] in device memory to one uint32 a lane, in a list."""
    codes = compat.load(ref, self.matrix(4))
    if self.interpret:
      parts = codes.astype(jnp.uint32)
      return [sum(parts[:, i] << 8 * i for i in range(4))]

    def emit(codes):
      word = ir.VectorType.get((1,), _int(32))
      return [vector.bitcast(word, c) for c in codes]

    return [
      _relabelled(
        [codes],
        [self.matrix(4)],
        self.block_shape,
        self.block_layout,
        jnp.uint32,
        emit,
      )
    ]

  def load_scales(self, ref):
    """uint8 [64] in device memory to a block's code in both its lanes."""
    if self.interpret:
      return jnp.repeat(compat.load(ref, None), 2)
    lanes = LANES // 2
    layout = plgpu.Layout.TILED(
      plgpu.Tiling(((lanes,), (lanes // 4,), (1,))),
      warp_dims=(-3,),
      lane_dims=(-2, plgpu.Replicated(2)),
      vector_dim=-1,
    )
    return _relabelled(
      [compat.load(ref, layout)],
      [layout],
      self.block_shape,
      self.block_layout,
      jnp.uint8,
      lambda scales: scales,
    )


@dataclasses.dataclass(frozen=True)
class Columns(Tile):
  """Blocks of sixteen rows: [16 down, 256 / down], two columns a lane.

  The lanes of a warp are ``down`` blocks deep and the rest of them side by
  side: what they read and write at once is whole sectors of 32 bytes, both of
  the rows of the operand and, with four blocks, of the columns of the codes.

  Attributes:
    down: blocks of a column, 1, 2 or 4.
  """

  interpret: bool = False
  down: int = 4

  @property
  def across(self) -> int:
    """Columns of the tile."""
    return 2 * LANES // self.down

  @property
  def shape(self):
    return (BLOCK * self.down, self.across)

  @property
  def layout(self):
    tiles = self.shape, (BLOCK * self.down, self.across // 4), (BLOCK, 2)
    return _tiled(*tiles, warp=-5, lane=(-4, -3))

  @property
  def block_shape(self):
    return (self.down, self.across)

  @property
  def block_layout(self):
    tiles = self.block_shape, (self.down, self.across // 4), (2,)
    return _tiled(*tiles, warp=-4, lane=(-3, -2))

  def _columns(self, width: int):
    """Layout of [across, down * width]: ``width`` of each block of a column."""
    n = self.across
    tiles = (n, self.down * width), (n // 4, self.down * width), (2, width)
    return _tiled(*tiles, warp=-6, lane=(-3, -4))

  def split(self, x):
    return list(jnp.moveaxis(x.reshape(self.down, BLOCK, -1), 1, 0))

  def merge(self, xs):
    return jnp.stack(xs, axis=1).reshape(self.shape)

  def codes(self, words):
    """Two uint32 words a block to uint8 [across, 8 down], column by column."""
    width = BLOCK // 2
    if self.interpret:
      parts = [w >> jnp.uint32(8 * i) & 0xFF for w in words for i in range(4)]
      both = jnp.stack(parts, axis=-1).astype(jnp.uint8)
      return jnp.swapaxes(both, 0, 1).reshape(self.across, self.down * width)
    return _relabelled(
      words,
      [self.block_layout] * 2,
      (self.across, self.down * width),
      self._columns(width),
      jnp.uint8,
      _interleaved,
    )

  def scales(self, code):
    """uint32 below 256 a block to uint8 [across, down], column by column."""
    if self.interpret:
      return code.T.astype(jnp.uint8)

    def emit(code):
      return [_vector([arith.trunci(_int(8), c)]) for c in _scalars(code)]

    return _relabelled(
      [code],
      [self.block_layout],
      (self.across, self.down),
      self._columns(1),
      jnp.uint8,
      emit,
    )

  def _blocks(self, array):
    rows = [_elements(r) for r in array.registers.flat]
    return [list(column) for column in zip(*rows, strict=True)]

  def _registers(self, blocks, size):
    return [_vector(row) for row in zip(*blocks, strict=True)]


COLUMN_SHAPES = tuple(Columns(False, down).shape for down in (4, 2, 1))
"""Shapes of the tiles of columns; an operand must hold one of them."""


def check_size(m: int, k: int) -> None:
  """Raises ValueError for operands whose addresses 32 bits do not hold."""
  if k > 2**26 or m * k > 2**34:
    raise ValueError(
      f"x[{m}, {k}] is too large for the kernels, which take 2**26 columns and"
      " 2**34 elements at most; divide it, or use the reference backend."
    )


def columns(m: int, k: int, interpret: bool, downs=(4, 2, 1)) -> Columns | None:
  """The tile of columns with which [m, k] overlaps least, the first of those.

  None if [m, k] holds none of them, or has broken blocks or pairs of columns.
  """
  if m % BLOCK or k % 2:
    return None
  tiles = [Columns(interpret, down) for down in downs]
  tiles = [t for t in tiles if t.shape[0] <= m and t.shape[1] <= k]

  def covered(tile):
    rows, across = tile.shape
    return -(-m // rows) * rows * -(-k // across) * across

  return min(tiles, key=covered, default=None)


def start(index, size: int, total: int, count: int):
  """Where part ``index`` of ``total`` begins.

  The last parts reach back where ``count`` parts of ``size`` are more than the
  total: what lies in two of them is computed twice, to the same bits.
  """
  first = index * size
  return first if count * size == total else jnp.minimum(first, total - size)


def _relabelled(arrays, layouts, shape, layout, dtype, emit):
  """An array of the registers that ``emit`` makes of the arguments'."""
  struct = plgpu.ShapeDtypeStruct(shape, np.dtype(dtype), layout=layout)

  @plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=struct)
  def run(ctx, *arrays):
    del ctx
    registers = emit(*(list(a.registers.flat) for a in arrays))
    return _array(registers, shape, layout, False)

  return run(*arrays)


def _scalars(registers):
  return [s for register in registers for s in _elements(register)]


def _interleaved(low, high):
  """Registers of eight bytes out of registers of words, scalar by scalar."""
  pairs = zip(_scalars(low), _scalars(high), strict=True)
  return [_bytes(a, b) for a, b in pairs]


def _bytes(low, high):
  """The eight bytes of two 32-bit integers."""
  return vector.bitcast(ir.VectorType.get((8,), _int(8)), _vector([low, high]))


def _shifted(x, left: int):
  """A 32-bit integer shifted left, or right where ``left`` is negative."""
  shift = _constant(abs(left), _int(32))
  return arith.shli(x, shift) if left >= 0 else arith.shrui(x, shift)


def _f32(bits):
  return lax.bitcast_convert_type(bits, jnp.float32)


def round_keys(key):
  """uint32 [20]: the two words that Philox adds in each of its rounds."""
  rounds = jnp.arange(ROUNDS, dtype=jnp.uint32)
  words = (
    word + rounds * jnp.uint32(w) for word, w in zip(key, WEYL, strict=True)
  )
  return jnp.stack(list(words), axis=-1).reshape(-1)


class _Mlir:
  """Integer arithmetic of ``_philox4x32`` on scalars of a kernel."""

  @staticmethod
  def multiply(x, factor):
    wide, shift = _int(64), _constant(32, _int(64))
    product = arith.muli(arith.extui(wide, x), _constant(factor, wide))
    high = arith.trunci(_int(32), arith.shrui(product, shift))
    return high, arith.trunci(_int(32), product)

  xor: Callable = arith.xori


class _Jnp:
  """The same on uint32 arrays; products by halves of 16 bits.

  ``fp4jax.rounding`` has them too: nothing here may import it.
  """

  @staticmethod
  def multiply(x, factor):
    low, high = x & 0xFFFF, x >> 16
    f_low, f_high = jnp.uint32(factor & 0xFFFF), jnp.uint32(factor >> 16)
    middle = high * f_low + (low * f_low >> 16)
    cross = low * f_high + (middle & 0xFFFF)
    top = high * f_high + (middle >> 16) + (cross >> 16)
    return top, x * jnp.uint32(factor)

  xor = staticmethod(lambda a, b: a ^ b)


def _philox4x32(ops, counter, keys):
  """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""
  c0, c1, c2, c3 = counter
  for k0, k1 in zip(keys[::2], keys[1::2], strict=True):
    high0, low0 = ops.multiply(c0, MULTIPLIERS[0])
    high1, low1 = ops.multiply(c2, MULTIPLIERS[1])
    c0, c1 = ops.xor(ops.xor(high1, c1), k0), low1
    c2, c3 = ops.xor(ops.xor(high0, c3), k1), low0
  return c0, c1, c2, c3


def _tiled(*tiles, warp, lane):
  """A tiled layout; its dimensions are counted in the tiles as given."""
  layout = fragmented_array.TiledLayout(
    fragmented_array.Tiling(tiles),
    warp_dims=(warp,),
    lane_dims=lane if isinstance(lane, tuple) else (lane,),
    vector_dim=-1,
    _check_canonical=False,
  ).canonicalize()
  return plgpu.Layout.TILED(
    plgpu.Tiling(layout.tiling.tiles),
    warp_dims=layout.warp_dims,
    lane_dims=layout.lane_dims,
    vector_dim=layout.vector_dim,
  )


def _int(bits):
  return ir.IntegerType.get_signless(bits)


def _constant(value, type_):
  attr: Any = ir.FloatAttr if isinstance(value, float) else ir.IntegerAttr
  constant: Any = arith.constant
  return constant(type_, attr.get(type_, value))


def _vector(values):
  """One vector of MLIR scalars or vectors of one element type."""
  parts = [
    v
    if isinstance(v.type, ir.VectorType)
    else vector.broadcast(ir.VectorType.get((1,), v.type), v)
    for v in values
  ]
  return mgpu_utils.vector_concat(parts)


def _elements(register):
  n = ir.VectorType(register.type).shape[0]
  return [vector.extract(register, [], [i]) for i in range(n)]


def _array(registers, shape, layout, signed=None):
  layout = layout.to_mgpu()
  grid = np.empty(layout.registers_shape(shape), dtype=object)
  grid.flat[:] = registers
  return mgpu.FragmentedArray(
    _registers=grid, _layout=layout, _is_signed=signed
  )
