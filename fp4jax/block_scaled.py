"""Block-scaled arrays: codes, block scales, tensor scale."""

import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fp4jax import _jax
from fp4jax import formats
from fp4jax import hadamard
from fp4jax import recipes
from fp4jax import rounding
from fp4jax import scaling


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("codes", "scales", "tensor_scale"),
  meta_fields=(
    "format",
    "block",
    "shape",
    "axis",
    "dtype",
    "packed",
    "row_scale",
  ),
)
@dataclasses.dataclass(frozen=True)
class BlockScaled:
  """A quantised operand: ``x ≈ code · block scale · tensor scale``.

  Attributes:
    codes: uint8 [*batch, m, k padded to the block], contraction axis last;
      where ``packed``, two codes a byte.
    scales: uint8 [*batch, m, blocks] or, for square blocks, [*batch, m blocks,
      blocks]; None without blocks.
    tensor_scale: float32 [*batch]; NaN where the operand was not finite. With
      ``row_scale`` [*batch, m]; NaN where the row was not.
    format: name of the format.
    block: (rows, contraction elements) that share a scale.
    shape: [*batch, m, k], the shape before padding.
    axis: the contraction axis of the array that was quantised.
    dtype: its dtype.
    packed: whether two codes share a byte.
    row_scale: whether rows have a tensor scale each.
  """

  codes: jax.Array
  scales: jax.Array | None
  tensor_scale: jax.Array
  format: str
  block: tuple[int, int]
  shape: tuple[int, ...]
  axis: int
  dtype: Any
  packed: bool
  row_scale: bool = False

  def decode(self, dtype=jnp.bfloat16) -> jax.Array:
    """Codes times block scales, [*batch, m, k]: exact in BF16."""
    return _decode(
      self.codes,
      self.scales,
      format=self.format,
      rows=self.block[0],
      packed=self.packed,
      size=self.shape[-1],
      dtype=jnp.dtype(dtype),
    )

  def dequantize(self, dtype=jnp.float32) -> jax.Array:
    """The values that the operand stands for, in the original layout."""
    x = self.decode(jnp.float32) * _wide(self.tensor_scale, self)
    return jnp.moveaxis(x, -1, self.axis).astype(dtype)

  def pack(self) -> "BlockScaled":
    """The same operand with 4-bit codes stored two a byte."""
    if self.packed or not formats.FORMATS[self.format].packed:
      return self
    return dataclasses.replace(
      self, codes=formats.pack(self.codes), packed=True
    )

  def transposed(self) -> "BlockScaled":
    """The codes of the other contraction axis, of packed square blocks."""
    rows, width = self.block
    if rows != width or self.scales is None or not self.packed:
      raise ValueError(
        f"transposed: blocks are {rows} x {width} and packed={self.packed},"
        " needed packed square blocks; quantise the array along its other axis."
      )
    *batch, m, k = self.shape
    codes = jnp.swapaxes(formats.unpack(self.codes), -1, -2)[..., :k, :]
    return dataclasses.replace(
      self,
      codes=formats.pack(hadamard.pad_last(codes, width)),
      scales=jnp.swapaxes(self.scales, -1, -2),
      shape=(*batch, k, m),
      axis=-3 - self.axis,
    )

  @property
  def nbytes(self) -> int:
    """Bytes that the quantised operand occupies."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("data",),
  meta_fields=("like",),
)
@dataclasses.dataclass(frozen=True)
class JoinedBlockScaled:
  """The codes, scales and tensor scale of a ``BlockScaled`` in one array.

  For what is compiled apart: a scan stacks what its layers keep, array by
  array, and XLA compiles loops to fill, to write and to read each kind.

  Attributes:
    data: uint8 [*batch, n].
    like: the ``BlockScaled``, without its arrays.
  """

  data: jax.Array
  like: BlockScaled

  @property
  def dtype(self):
    """The dtype of the array that was quantised."""
    return self.like.dtype

  def decode(self) -> tuple[jax.Array, jax.Array]:
    """Codes times block scales [*batch, m, k] in BF16, and tensor scales."""
    return _decode_joined(self.data, like=self.like)


def quantize_array(
  x,
  operand: "recipes.Operand",
  key=None,
  *,
  axis: int = -1,
  packed: bool = True,
) -> BlockScaled:
  """Quantises an array as a GEMM operand.

  Args:
    x: [*batch, m, k] float, k contracted; each batch element is an operand of
      its own, with its own tensor scale.
    operand: format, block, rounding.
    key: a PRNG key, or the uint32[3] stream of ``rounding.site_stream``; needed
      for stochastic rounding and for drawn signs.
    axis: the contraction axis, -1 or -2.
    packed: store 4-bit codes two a byte.

  Returns:
    A ``BlockScaled`` with the contraction axis last.

  Raises:
    ValueError: for fewer than two axes, or an operand that needs a key (its
      rounding or its rotation is random) without one.

  >>> import fp4jax
  >>> x = jnp.array([[0.0, 1.0, -2.5, 6.0] + 12 * [0.0]])
  >>> q = quantize_array(x, fp4jax.Operand())
  >>> [round(v, 4) for v in q.dequantize()[0, :4].tolist()]
  [0.0, 1.0, -2.0, 6.0]
  """
  if x.ndim < 2:
    raise ValueError(
      f"quantize_array: x has shape {x.shape}, needed [*batch, m, k]; add an"
      " axis of size 1."
    )
  if not operand.stochastic:
    stream = None
  elif key is None:
    what = f"rounding={operand.rounding!r}"
    if operand.rounding == "rne":
      what = "rht.signs=None"
    raise ValueError(
      f"quantize_array: {what} needs a key; pass key=jax.random.key(0)."
    )
  elif getattr(key, "shape", None) == (3,):
    stream = key
  else:
    stream = rounding.site_stream(key)
  codes = quantize(x, operand, stream, axis=axis, packed=packed).codes
  assert codes is not None  # asked for
  return codes


class Quantised(NamedTuple):
  """An operand quantised, None for what was not asked for.

  Attributes:
    codes: a ``BlockScaled``, the contraction axis last.
    decoded: BF16 codes times block scales; a contraction axis that is rotated
      is padded to the rotation.
    tensor_scale: float32 [*batch], or [*batch, m] of rows.
  """

  codes: BlockScaled | None
  decoded: jax.Array | None
  tensor_scale: jax.Array


def quantize(
  x,
  operand: "recipes.Operand",
  stream=None,
  rotation=None,
  *,
  axis: int = -1,
  codes: bool = True,
  decoded: bool = False,
  packed: bool = True,
) -> Quantised:
  """Quantises one operand of a GEMM.

  Args:
    x: [*batch, m, k] float, k contracted; for ``axis`` -2 [*batch, k, m].
    operand: format, block, rounding.
    stream: uint32[3] of ``rounding.site_stream``, for stochastic rounding.
    rotation: likewise, for signs of the rotation that are drawn; None is
      ``stream``.
    axis: the contraction axis, -1 or -2.
    codes: whether codes are wanted.
    decoded: whether decoded values are wanted.
    packed: store 4-bit codes two a byte.

  Returns:
    What was asked for, the contraction axis last.
  """
  packed = packed and formats.FORMATS[operand.format].packed
  elements, scales, tensor_scale, values = _quantize(
    _read(x),
    stream,
    _rotation(operand, stream, rotation),
    operand=operand,
    axis=axis,
    codes=codes,
    decoded=decoded,
    packed=packed,
  )
  scaled = None
  if codes:
    scaled = _block_scaled(
      x, operand, axis, packed, elements, scales, tensor_scale
    )
  return Quantised(scaled, values, tensor_scale)


def quantize_joined(
  x, operand: "recipes.Operand", stream=None, rotation=None, *, axis: int = -1
) -> JoinedBlockScaled:
  """The packed codes of ``quantize``, in one array; of the same arguments."""
  rotation = _rotation(operand, stream, rotation)
  data = _quantize_joined(
    _read(x), stream, rotation, operand=operand, axis=axis
  )
  packed = formats.FORMATS[operand.format].packed
  like = _block_scaled(x, operand, axis, packed, None, None, None)
  return JoinedBlockScaled(data, like)


def _rotation(operand, stream, rotation):
  """The stream that signs are drawn from, None where they are fixed."""
  if operand.rht is None or operand.rht.signs is not None:
    return None
  return stream if rotation is None else rotation


def _read(x):
  """An operand, rounded to its dtype."""
  # What is compiled apart reads it from memory.
  return x if _jax.compiles_units() else scaling.read(x)


def _block_scaled(x, operand, axis, packed, codes, scales, tensor_scale):
  """The codes of an array with what is static of it."""
  shape = x.shape if axis == -1 else (*x.shape[:-2], x.shape[-1], x.shape[-2])
  return BlockScaled(
    codes=codes,
    scales=scales,
    tensor_scale=tensor_scale,
    format=operand.format,
    block=operand.block if formats.FORMATS[operand.format].block else (1, 1),
    shape=rotated_shape(shape, operand.rht),
    axis=axis,
    dtype=x.dtype,
    packed=packed,
    row_scale=operand.row_scale,
  )


def rotated_shape(shape, rht):
  """A shape whose last axis is padded to the rotation."""
  if rht is None:
    return shape
  return (*shape[:-1], -(-shape[-1] // rht.size) * rht.size)


@_jax.compiled_once
def _quantize(x, stream, rotation, *, operand, axis, codes, decoded, packed):
  """``_parts`` of an operand, its codes packed."""
  elements, *rest = _parts(x, stream, rotation, operand, axis, codes, decoded)
  return (formats.pack(elements) if codes and packed else elements, *rest)


@_jax.compiled_once
def _quantize_joined(x, stream, rotation, *, operand, axis):
  """Packed codes, block scales and tensor scale as bytes [*batch, n]."""
  elements, scales, scale, _ = _parts(
    x, stream, rotation, operand, axis, True, False
  )
  elements = _in_one_row(elements)[..., 0, :]
  if formats.FORMATS[operand.format].packed:
    elements = formats.pack(elements)
  parts = [elements]
  if scales is not None:
    parts.append(_in_one_row(scales)[..., 0, :])
  scale = lax.bitcast_convert_type(scale, jnp.uint8)
  if operand.row_scale:
    scale = scale.reshape(*scale.shape[:-2], scale.shape[-2] * 4)
  parts.append(scale)
  return jnp.concatenate(parts, -1)


@_jax.compiled_once
def _decode_joined(data, *, like):
  """BF16 [*batch, m, size] values and tensor scales of joined codes."""
  fmt = formats.FORMATS[like.format]
  rows, width = like.block
  *batch, m, k = like.shape
  blocks = -(-k // (fmt.block or 1))
  shape = *batch, m, blocks * width
  size = m * blocks * width // (2 if like.packed else 1)
  last = 4 * m if like.row_scale else 4
  codes, scales, scale = jnp.split(data, (size, data.shape[-1] - last), axis=-1)
  codes = formats.unpack(codes) if like.packed else codes
  if fmt.block:
    scales = scales.reshape(*batch, -(-m // rows), blocks)
  values = _values(codes.reshape(shape), scales, fmt, rows)
  if like.row_scale:
    scale = scale.reshape(*batch, m, 4)
  scale = lax.bitcast_convert_type(scale, jnp.float32)
  return values[..., :k].astype(jnp.bfloat16), scale


def _parts(x, stream, rotation, operand, axis, codes, decoded):
  """Codes, block scale codes, tensor scale and decoded values of an operand."""
  fmt = formats.FORMATS[operand.format]
  x = jnp.moveaxis(x, axis, -1).astype(jnp.float32)
  x = hadamard.rht(x, operand.rht, rotation) if operand.rht else x
  size = x.shape[-1]
  x = hadamard.pad_last(x, fmt.block or 1)
  shape = x.shape
  if _joins_rows(operand):
    # One row: what works on blocks is compiled once for as many blocks.
    x = _in_one_row(x)
  magnitude = scaling.magnitude(x)
  tops = (
    scaling.block_amax(magnitude, operand.block) if fmt.block else magnitude
  )
  find_amax = scaling.row_amax if operand.row_scale else scaling.operand_amax
  amax = find_amax(tops)
  finite = jnp.isfinite(amax)
  random = None
  if operand.rounding == "sr":
    random = rounding.random_bits(stream, shape, operand.sr_bits)
    random = random.reshape(x.shape)
  if operand.rounding == "eden":  # a number a block
    blocks = (*shape[:-1], shape[-1] // operand.block[1])
    random = rounding.random_bits(stream, blocks, operand.sr_bits)
    random = random.reshape(tops.shape)
  if fmt.block is None:
    encode = scaling.encode_scale(amax, fmt.element.max)
    live = finite & (amax >= scaling.SMALLEST)
    per_element = _wide(jnp.where(live, encode, 0.0), operand)
    elements = _encode(x, per_element, fmt.element.max, fmt, operand, random)
    scales, decode = None, scaling.divide(1.0, encode)
  else:
    live = (tops >= scaling.SMALLEST) & _wide(finite, operand)
    tops = jnp.where(live, tops, 0.0)
    if fmt.scale == "e8m0":
      elements, scales = _microscale(x, tops, fmt, operand, random)
      decode = jnp.ones_like(amax)
    else:
      elements, scales, decode = _two_level(x, amax, tops, fmt, operand, random)
  values = None
  if decoded:
    values = _values(elements, scales, fmt, operand.block[0])
    values = values.reshape(shape)[..., :size].astype(jnp.bfloat16)
  if not codes:
    elements = scales = None
  else:
    elements = elements.reshape(shape)
    if scales is not None and operand.block[0] == 1:
      scales = scales.reshape(*shape[:-1], shape[-1] // fmt.block)
  return elements, scales, jnp.where(finite, decode, jnp.nan), values


@_jax.compiled_once
def _decode(codes, scales, *, format, rows, packed, size, dtype):
  """[*batch, m, size] values of codes and block scale codes."""
  codes = formats.unpack(codes) if packed else codes
  values = _values(codes, scales, formats.FORMATS[format], rows)
  return values[..., :size].astype(dtype)


def _joins_rows(operand) -> bool:
  """Whether an operand is quantised as one row: blocks are compiled once."""
  alone = operand.block[0] == 1 and not operand.row_scale
  return alone and _jax.compiles_units()


def _wide(scale, operand):
  """Tensor scales [*batch], or [*batch, m] of rows, against [*batch, m, k]."""
  return scale[..., None] if operand.row_scale else scale[..., None, None]


def _in_one_row(x):
  """[*batch, m, k] to [*batch, 1, m * k]."""
  return x.reshape(*x.shape[:-2], 1, math.prod(x.shape[-2:]))


def _values(codes, scales, fmt, rows):
  """float32 [*batch, m, k] values of unpacked codes and block scale codes."""
  values = formats.decode(codes, fmt.element)
  if fmt.scale is None:
    return values
  scales = scaling.decode_block_scale(scales, fmt.scale)
  return _times_blocks(values, _rows(scales, rows, values))


def _encode(x, inverse, limit, fmt, operand, random):
  """Codes of ``x * inverse``; all 0 where ``inverse`` is."""
  if fmt.element.min_exponent < -8:  # a range that reaches FP32's subnormals
    x = jnp.where(jnp.abs(x) < scaling.NORMAL, 0.0 * x, x)
  scaled = jnp.where(inverse == 0, 0.0, x * inverse)
  return formats.encode(scaled, fmt.element, random, operand.sr_bits, limit)


def _encode_blocks(x, inverse, limit, fmt, operand, random):
  """``_encode`` with [*batch, m or m blocks, blocks] inverse scales."""
  spread = _spread(_rows(inverse, operand.block[0], x), x)
  return _encode(x, spread, limit, fmt, operand, random)


def _microscale(x, tops, fmt, operand, random):
  """OCP MX: power-of-two block scales, no tensor scale."""
  scales = formats.encode_e8m0(tops, fmt.element.max)
  # 2**-e, and 0 for the code of a zero block.
  pattern = jnp.where(scales == 0, 0, 254 - scales.astype(jnp.uint32)) << 23
  inverse = lax.optimization_barrier(formats.bits_float(pattern))
  limit = fmt.element.max
  return _encode_blocks(x, inverse, limit, fmt, operand, random), scales


def _two_level(x, amax, tops, fmt, operand, random):
  """NVFP4: E4M3 block scales under a float32 tensor scale."""
  six, eden = operand.four_over_six, operand.rounding == "eden"
  per_element = None if eden else random
  encode, decode, per_block, scale_max = scaling.two_level_scale(amax, operand)
  v = tops * _wide(per_block, operand)
  v = jnp.where((tops == 0) | (v < scaling.NORMAL), 0.0, v)

  def candidate(v, limit):
    shape = v.shape
    if _jax.compiles_units() and not operand.row_scale:
      v = _in_one_row(v)
    scales = scaling.encode_block_scale(v, fmt.scale, operand.rounding)
    scales = lax.optimization_barrier(scales)
    value = scaling.decode_block_scale(scales, fmt.scale)
    inverse = jnp.where(
      value == 0, 0.0, scaling.divide(1.0, value * _wide(decode, operand))
    )
    # Unfused: a scale is worked out once a block, not once an element.
    inverse = lax.optimization_barrier(inverse)
    scales, value = scales.reshape(shape), value.reshape(shape)
    inverse = inverse.reshape(shape)
    codes = _encode_blocks(x, inverse, limit, fmt, operand, per_element)
    return scales, value, codes

  scales, value, codes = candidate(jnp.minimum(v, scale_max), 6.0)
  if six:
    codes = lax.optimization_barrier(codes)
    target = _clear_low_bits(x * _wide(encode, operand))
    error = _block_error(target, value, codes, fmt, operand)
    v4 = jnp.minimum(1.5 * v, 1.5 * scale_max)
    limit4 = 4.0 if fmt.scale == "restricted" else 6.0
    scales4, value4, codes4 = candidate(v4, limit4)
    codes4 = lax.optimization_barrier(codes4)
    better = _block_error(target, value4, codes4, fmt, operand) < error
    scales = jnp.where(better, scales4, scales)
    rows = _rows(better, operand.block[0], x)
    codes = jnp.where(_spread(rows, x), codes4, codes)
  if eden:
    scaled = x * _wide(encode, operand)
    scales, codes = _eden(scaled, value, codes, random, fmt, operand)
  return codes, scales, decode


def _eden(scaled, value, codes, random, fmt, operand):
  """Block scales s ⟨y, y⟩ / ⟨y, Q(y)⟩, rounded stochastically, and codes.

  Over random rotations the expectation of what is so corrected is y, where that
  of the nearest codes is shorter.

  Args:
    scaled: [*batch, m, k] values in units of the tensor scale.
    value: [*batch, m, blocks] block scales that the codes are of.
    codes: [*batch, m, k], rounded to nearest.
    random: uint32 bits of every block.
    fmt: the format.
    operand: the operand.

  References:
    Vargaftik et al., "EDEN: communication-efficient and robust distributed mean
    estimation", ICML 2022; Quartet II, arXiv 2601.22813, section 4.
  """
  # To 12 significant bits, so that every product is exact.
  half_up = formats.float_bits(scaled) + jnp.uint32(0x800)
  y = formats.bits_float(half_up & jnp.uint32(0xFFFFF000))
  codes = lax.optimization_barrier(codes)
  q = _times_blocks(formats.decode(codes, fmt.element), value)
  y, q = lax.optimization_barrier((y, q))
  blocks = (*value.shape, operand.block[1])
  squares = _pairwise_sum((y * y).reshape(blocks))
  products = _pairwise_sum((y * q).reshape(blocks))
  zero = value == 0
  ratio = scaling.divide(
    jnp.where(zero, 1.0, squares), jnp.where(zero, 1.0, products)
  )
  corrected = jnp.minimum(ratio * value, fmt.scale_max)
  corrected = lax.optimization_barrier(corrected)
  index = formats.round_to_grid(
    corrected, formats.E4M3, random, operand.sr_bits
  )
  gone = _spread(index == 0, scaled)
  return index.astype(jnp.uint8), jnp.where(gone, jnp.uint8(0), codes)


def _clear_low_bits(x):
  """float32 with its low 12 bits cleared: its square is exact."""
  return formats.bits_float(formats.float_bits(x) & jnp.uint32(0xFFFFF000))


def _block_error(target, value, codes, fmt, operand):
  """Squared error of each block in units of the tensor scale."""
  rows, width = operand.block
  decoded = formats.decode(codes, fmt.element)
  d = _times_blocks(decoded, _rows(value, rows, target)) - target
  d = lax.optimization_barrier(_clear_low_bits(d))  # one pass, not sixteen
  *lead, m, k = d.shape
  error = _pairwise_sum((d * d).reshape(*lead, m, k // width, width))
  return error if rows == 1 else add_rows(error, rows)


def add_rows(error, rows: int):
  """[*batch, m, blocks] to [*batch, m blocks, blocks], added pairwise."""
  error = hadamard.pad_last(jnp.swapaxes(error, -1, -2), rows)
  error = error.reshape(*error.shape[:-1], error.shape[-1] // rows, rows)
  return jnp.swapaxes(_pairwise_sum(error), -1, -2)


def _pairwise_sum(x):
  """Sum over the last axis, a power of two: halves added, then halves again."""
  while x.shape[-1] > 1:
    half = x.shape[-1] // 2
    x = x[..., :half] + x[..., half:]
  return x[..., 0]


def _rows(per_block, rows: int, like):
  """[*batch, m blocks, blocks] to one row for each of ``like``'s m rows."""
  if rows == 1:
    return per_block
  return jnp.repeat(per_block, rows, axis=-2)[..., : like.shape[-2], :]


def _spread(per_row, like):
  """[*batch, m, blocks] to [*batch, m, k], each block's value repeated."""
  *lead, m, blocks = per_row.shape
  width = like.shape[-1] // blocks if blocks else 1
  spread = lax.broadcast_in_dim(
    per_row, (*per_row.shape, width), tuple(range(per_row.ndim))
  )
  return spread.reshape(*lead, m, blocks * width)


def _times_blocks(x, per_row):
  """[*batch, m, k] times its [*batch, m, blocks] block values."""
  return x * _spread(per_row, x)
