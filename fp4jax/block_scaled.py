"""Block-scaled arrays: codes, block scales, tensor scale."""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from fp4jax import _jax
from fp4jax import formats
from fp4jax import hadamard
from fp4jax import recipes
from fp4jax import rounding
from fp4jax import scaling


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("codes", "scales", "tensor_scale"),
  meta_fields=("format", "block", "shape", "axis", "dtype", "packed"),
)
@dataclasses.dataclass(frozen=True)
class BlockScaled:
  """A quantised operand: ``x ≈ code · block scale · tensor scale``.

  Attributes:
    codes: uint8 [*batch, m, k padded to the block], contraction axis last;
      where ``packed``, two codes a byte.
    scales: uint8 [*batch, m, blocks] or, for square blocks, [*batch, m blocks,
      blocks]; None without blocks.
    tensor_scale: float32 [*batch]; NaN where the operand was not finite.
    format: name of the format.
    block: (rows, contraction elements) that share a scale.
    shape: [*batch, m, k], the shape before padding.
    axis: the contraction axis of the array that was quantised.
    dtype: its dtype.
    packed: whether two codes share a byte.
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
    x = self.decode(jnp.float32) * self.tensor_scale[..., None, None]
    return jnp.moveaxis(x, -1, self.axis).astype(dtype)

  def pack(self) -> "BlockScaled":
    """The same operand with 4-bit codes stored two a byte."""
    if self.packed or not formats.FORMATS[self.format].packed:
      return self
    return dataclasses.replace(
      self, codes=formats.pack(self.codes), packed=True
    )

  @property
  def nbytes(self) -> int:
    """Bytes that the quantised operand occupies."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))


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
      for stochastic rounding.
    axis: the contraction axis, -1 or -2.
    packed: store 4-bit codes two a byte.

  Returns:
    A ``BlockScaled`` with the contraction axis last.

  Raises:
    ValueError: for fewer than two axes, or stochastic rounding without a key.

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
  if operand.rounding == "rne":
    stream = None
  elif key is None:
    raise ValueError(
      "quantize_array: rounding='sr' needs a key; pass key=jax.random.key(0)."
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
    tensor_scale: float32 [*batch].
  """

  codes: BlockScaled | None
  decoded: jax.Array | None
  tensor_scale: jax.Array


def quantize(
  x,
  operand: "recipes.Operand",
  stream=None,
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
    axis: the contraction axis, -1 or -2.
    codes: whether codes are wanted.
    decoded: whether decoded values are wanted.
    packed: store 4-bit codes two a byte.

  Returns:
    What was asked for, the contraction axis last.
  """
  fmt = formats.FORMATS[operand.format]
  packed = packed and fmt.packed
  elements, scales, tensor_scale, values = _quantize(
    # What is compiled apart reads x from memory, rounded to its dtype.
    x if _jax.compiles_units() else scaling.read(x),
    stream,
    operand=operand,
    axis=axis,
    codes=codes,
    decoded=decoded,
    packed=packed,
  )
  shape = x.shape if axis == -1 else (*x.shape[:-2], x.shape[-1], x.shape[-2])
  scaled = None
  if codes:
    scaled = BlockScaled(
      codes=elements,
      scales=scales,
      tensor_scale=tensor_scale,
      format=operand.format,
      block=operand.block if fmt.block else (1, 1),
      shape=rotated_shape(shape, operand.rht),
      axis=axis,
      dtype=x.dtype,
      packed=packed,
    )
  return Quantised(scaled, values, tensor_scale)


def rotated_shape(shape, rht):
  """A shape whose last axis is padded to the rotation."""
  if rht is None:
    return shape
  return (*shape[:-1], -(-shape[-1] // rht.size) * rht.size)


@_jax.compiled_once
def _quantize(x, stream, *, operand, axis, codes, decoded, packed):
  """Codes, block scale codes, tensor scale and decoded values of an operand."""
  fmt = formats.FORMATS[operand.format]
  x = jnp.moveaxis(x, axis, -1)
  x = hadamard.rht(x, rht=operand.rht) if operand.rht else x
  size = x.shape[-1]
  x = hadamard.pad_last(x, fmt.block or 1)
  shape = x.shape
  random = None
  if operand.rounding == "sr":
    random = rounding.random_bits(stream, shape, operand.sr_bits)
  if operand.block[0] == 1 and _jax.compiles_units():
    # One row: what works on blocks is compiled once for as many blocks.
    x, random = (_one_row(a) for a in (x, random))
  elements, scales, tensor_scale, values = _quantize_blocks(
    x,
    random,
    operand=dataclasses.replace(operand, rht=None),
    codes=codes,
    decoded=decoded,
    packed=packed,
  )
  if decoded:
    values = values.reshape(shape)[..., :size]
  if codes:
    elements = elements.reshape(*shape[:-1], shape[-1] // (1 + packed))
  if scales is not None and operand.block[0] == 1:
    scales = scales.reshape(*shape[:-1], shape[-1] // fmt.block)
  return elements, scales, tensor_scale, values


def _one_row(x):
  """[*batch, m, k] to [*batch, 1, m * k]."""
  return x if x is None else x.reshape(*x.shape[:-2], 1, -1)


@_jax.compiled_once
def _quantize_blocks(x, random, *, operand, codes, decoded, packed):
  """``_quantize`` of [*batch, m, k] with whole blocks along k."""
  fmt = formats.FORMATS[operand.format]
  x = x.astype(jnp.float32)
  tops = block_amax(scaling.magnitude(x), operand.block if fmt.block else None)
  amax = scaling.operand_amax(tops)
  candidates, encode, tensor_scale = _block_scales(tops, amax, operand)
  elements, scales = _elements(x, random, candidates, encode, operand)
  values = None
  if decoded:
    values = _values(elements, scales, fmt, operand.block[0])
    values = values.astype(jnp.bfloat16)
  if not codes:
    return None, None, tensor_scale, values
  elements = formats.pack(elements) if packed else elements
  return elements, scales, tensor_scale, values


@_jax.compiled_once
def _decode(codes, scales, *, format, rows, packed, size, dtype):
  """[*batch, m, size] values of codes and block scale codes."""
  codes = formats.unpack(codes) if packed else codes
  values = _values(codes, scales, formats.FORMATS[format], rows)
  return values[..., :size].astype(dtype)


def _values(codes, scales, fmt, rows):
  """float32 [*batch, m, k] values of unpacked codes and block scale codes."""
  values = formats.decode(codes, fmt.element)
  if fmt.scale is None:
    return values
  scales = scaling.decode_block_scale(scales, fmt.scale)
  return _times_blocks(values, _rows(scales, rows, values))


class TwoLevelScale(NamedTuple):
  """What an operand's amax says about the scales of its blocks.

  Attributes:
    encode: float32 [*batch], multiplies values.
    decode: its reciprocal, the tensor scale.
    per_block: multiplies a block's amax, to give its scale.
    block_max: the largest block scale.
  """

  encode: Any
  decode: Any
  per_block: Any
  block_max: float


def two_level_scale(amax, operand: "recipes.Operand") -> TwoLevelScale:
  """The scales of an operand of the float32 amax [*batch]."""
  fmt = formats.FORMATS[operand.format]
  six = operand.four_over_six
  block_max = 256.0 if six and fmt.scale == "e4m3" else fmt.scale_max
  guard = operand.scale_guard
  encode = scaling.encode_scale(amax, 6 * block_max * guard)
  return TwoLevelScale(
    encode,
    scaling.divide(1.0, encode),
    encode * np.float32(1 / (6 * guard)),
    block_max,
  )


class Candidate(NamedTuple):
  """One choice of scales for the blocks of an operand.

  Attributes:
    scales: uint8 [*batch, m or m blocks, blocks] codes; None without blocks.
    inverse: float32, multiplies elements; 0 where codes are to be 0.
  """

  scales: Any
  inverse: Any


def _block_scales(tops, amax, operand: "recipes.Operand"):
  """``_scales`` of [*batch, m or m blocks, blocks] amax."""
  fmt = formats.FORMATS[operand.format]
  # Operands that differ in what scales do not depend on share them.
  operand = dataclasses.replace(
    operand, block=(1, fmt.block or operand.block[1]), sr_bits=16
  )
  if fmt.scale != "restricted":
    operand = dataclasses.replace(operand, rounding="rne")
  if not _jax.compiles_units():
    return _scales(tops, amax, operand=operand)
  candidates, *rest = _scales(_one_row(tops), amax, operand=operand)
  shaped = lambda a: a.reshape(tops.shape)
  return jax.tree.map(shaped, candidates), *rest


@_jax.compiled_once
def _scales(tops, amax, *, operand):
  """Candidates, what 4/6 compares them by, and the tensor scale.

  Args:
    tops: float32 [*batch, rows, blocks] amax of blocks, Inf for NaN.
    amax: float32 [*batch], of the operand.
    operand: format and rounding.

  Returns:
    The candidates, two for 4/6; float32 [*batch] S_enc, and the tensor scale,
    NaN where the operand is not finite.
  """
  fmt = formats.FORMATS[operand.format]
  finite = jnp.isfinite(amax)
  live = (tops >= scaling.SMALLEST) & finite[..., None, None]
  tops = jnp.where(live, tops, 0.0)
  if fmt.scale is None:
    encode = scaling.encode_scale(amax, fmt.element.max)
    decode = jnp.where(finite, scaling.divide(1.0, encode), jnp.nan)
    inverse = jnp.where(live, encode[..., None, None], 0.0)
    candidates = [Candidate(None, inverse)]
  elif fmt.scale == "e8m0":
    encode = jnp.ones_like(amax)
    decode = jnp.where(finite, encode, jnp.nan)
    candidates = [_microscale(tops, fmt)]
  else:
    encode, decode, per_block, scale_max = two_level_scale(amax, operand)
    decode = jnp.where(finite, decode, jnp.nan)
    v = tops * per_block[..., None, None]
    v = jnp.where((tops == 0) | (v < scaling.NORMAL), 0.0, v)
    choices = [jnp.minimum(v, scale_max)]
    if operand.four_over_six:
      choices.append(jnp.minimum(1.5 * v, 1.5 * scale_max))
    candidates = [_two_level(v, decode, fmt, operand) for v in choices]
  return candidates, encode, decode


def _microscale(tops, fmt) -> Candidate:
  """OCP MX: power-of-two block scales, no tensor scale."""
  scales = formats.encode_e8m0(tops, fmt.element.max)
  # 2**-e, and 0 for the code of a zero block.
  pattern = jnp.where(scales == 0, 0, 254 - scales.astype(jnp.uint32)) << 23
  return Candidate(scales, formats.bits_float(pattern))


def _two_level(v, decode, fmt, operand) -> Candidate:
  """NVFP4: E4M3 block scales under a float32 tensor scale."""
  scales = scaling.encode_block_scale(v, fmt.scale, operand.rounding)
  scales = lax.optimization_barrier(scales)
  value = scaling.decode_block_scale(scales, fmt.scale)
  inverse = scaling.divide(1.0, value * decode[..., None, None])
  return Candidate(scales, jnp.where(value == 0, 0.0, inverse))


def _elements(x, random, candidates, encode, operand):
  """Codes of the elements, and of the block scales chosen for them."""
  fmt = formats.FORMATS[operand.format]
  first, *others = candidates
  codes = _encode(x, first.inverse, fmt.element.max, operand, random)
  scales = first.scales
  for other in others:  # 4/6
    target = _clear_low_bits(x * encode[..., None, None])
    limit = 4.0 if fmt.scale == "restricted" else 6.0
    codes4 = _encode(x, other.inverse, limit, operand, random)
    codes, codes4 = lax.optimization_barrier((codes, codes4))
    error = _block_error(target, scales, codes, operand)
    better = _block_error(target, other.scales, codes4, operand) < error
    scales = jnp.where(better, other.scales, scales)
    rows = _rows(better, operand.block[0], x)
    codes = jnp.where(_spread(rows, x), codes4, codes)
  return codes, scales


def _encode(x, inverse, limit, operand, random):
  """Codes of x times its block's inverse; all 0 where that is."""
  element = formats.FORMATS[operand.format].element
  if element.min_exponent < -8:  # a range that reaches FP32's subnormals
    x = jnp.where(jnp.abs(x) < scaling.NORMAL, 0.0 * x, x)
  # Unfused: a scale is worked out once a block, not once an element.
  inverse = lax.optimization_barrier(inverse)
  inverse = _spread(_rows(inverse, operand.block[0], x), x)
  scaled = jnp.where(inverse == 0, 0.0, x * inverse)
  return formats.encode(scaled, element, random, operand.sr_bits, limit)


def _clear_low_bits(x):
  """float32 with its low 12 bits cleared: its square is exact."""
  return formats.bits_float(formats.float_bits(x) & jnp.uint32(0xFFFFF000))


def _block_error(target, scales, codes, operand):
  """Squared error of each block in units of the tensor scale."""
  fmt = formats.FORMATS[operand.format]
  rows, width = operand.block
  d = _values(codes, scales, fmt, rows) - target
  d = lax.optimization_barrier(_clear_low_bits(d))  # one pass, not sixteen
  *lead, m, k = d.shape
  error = _pairwise_sum((d * d).reshape(*lead, m, k // width, width))
  if rows == 1:
    return error
  error = hadamard.pad_last(jnp.swapaxes(error, -1, -2), rows)
  error = error.reshape(*error.shape[:-1], error.shape[-1] // rows, rows)
  return jnp.swapaxes(_pairwise_sum(error), -1, -2)


def _pairwise_sum(x):
  """Sum over the last axis, a power of two: halves added, then halves again."""
  while x.shape[-1] > 1:
    half = x.shape[-1] // 2
    x = x[..., :half] + x[..., half:]
  return x[..., 0]


def block_amax(magnitude, block):
  """[*batch, m, k] magnitudes to [*batch, m or m blocks, blocks] amax.

  Without a block, all of an operand is one: [*batch, 1, 1].
  """
  if block is None:
    return scaling.largest(magnitude, (-2, -1))[..., None, None]
  rows, width = block
  *lead, m, k = magnitude.shape
  if m % rows:
    rest = [*[(0, 0)] * len(lead), (0, -m % rows), (0, 0)]
    magnitude = jnp.pad(magnitude, rest)
  blocks = magnitude.reshape(*lead, -(-m // rows), rows, k // width, width)
  return scaling.largest(blocks, (-3, -1))


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
