"""An independent model of docs/numerics.md, in NumPy and nothing else.

Every function follows one paragraph of the page, with the page's letters.
Grids are written out, values are rounded by comparing them with midpoints in
float64, where all of them are exact. Steps for which the page says FP32 are
single IEEE operations on float32 arrays; an input or a product below 2^-126
is zero, as XLA's CPU backend has it. Nothing here is meant to be fast.

Arrays come as `[*batch, row, k]`, k the contraction axis, float32 (a BF16
array is converted by the caller, which is exact).
"""

from typing import NamedTuple

import numpy as np

F32 = np.float32
TINY = F32(2.0**-126)  # the least normal number of FP32 and BF16
SMALLEST = F32(2.0**-100)  # operands and blocks with a smaller amax are zero

# name: (bits, min normal exponent, mantissa bits, max)
ELEMENTS = {
  "E2M1": (4, 0, 1, 6.0),
  "E4M3": (8, -6, 3, 448.0),
  "E5M2": (8, -14, 2, 57344.0),
}

# format: (element, block length, scale_max)
FORMATS = {
  "nvfp4": ("E2M1", 16, 448.0),
  "nvfp4_fp8_exact": ("E2M1", 16, 64.0),
  "mxfp4": ("E2M1", 32, None),
  "mxfp8": ("E4M3", 32, None),
  "mxfp8_e5m2": ("E5M2", 32, None),
  "fp8_e4m3": ("E4M3", None, None),
  "fp8_e5m2": ("E5M2", None, None),
}


def same_bits(actual, expected):
  """Asserts equal shapes, values and signs of zeros; NaN equals NaN."""
  actual, expected = np.asarray(actual), np.asarray(expected)
  np.testing.assert_array_equal(actual, expected, strict=True)
  if actual.dtype.kind == "f":
    number = ~np.isnan(actual)
    np.testing.assert_array_equal(
      np.signbit(actual)[number], np.signbit(expected)[number]
    )


# Elements


def grid(element):
  """The finite magnitudes of an element, ascending, float64."""
  _, min_exponent, mantissa_bits, largest = ELEMENTS[element]
  steps = 2**mantissa_bits
  values = [i / steps * 2.0**min_exponent for i in range(steps)]
  exponent = min_exponent
  while 2.0**exponent <= largest:
    values += [(1 + i / steps) * 2.0**exponent for i in range(steps)]
    exponent += 1
  return np.array([value for value in values if value <= largest])


def encode(values, element, bits=None, sr_bits=16):
  """Codes of finite values, saturating; RNE, or SR with random `bits`."""
  points = grid(element)
  values = np.asarray(values, np.float64)
  a = np.minimum(np.abs(values), points[-1])
  low = np.searchsorted(points, a, side="right") - 1
  high = np.minimum(low + 1, len(points) - 1)
  q = np.append(np.diff(points), points[-1] - points[-2])[low]
  if bits is None:
    midpoint = (points[low] + points[high]) / 2
    up = (a > midpoint) | ((a == midpoint) & (low % 2 == 1))
    index = np.where(up, high, low)
  else:
    r = np.asarray(bits, np.float64)
    if sr_bits == 16:
      t = (a + (r - 32767.5) / 65536 * q).astype(F32)
      n = np.rint(t / q)
    else:
      t = (a + r / 256 * q).astype(F32)
      n = np.floor(t / q)
    index = np.searchsorted(points, n * q)
  sign = np.signbit(values).astype(np.int64)
  return (index + (sign << (ELEMENTS[element][0] - 1))).astype(np.uint8)


def decode(codes, element):
  """Values of codes, float64; the codes above E5M2's and E4M3's max are NaN
  or Inf as in IEEE and OCP."""
  points = grid(element)
  if element == "E4M3":
    points = np.append(points, np.nan)
  if element == "E5M2":
    points = np.append(points, [np.inf, np.nan, np.nan, np.nan])
  return np.append(points, -points)[np.asarray(codes, np.int64)]


def pack(codes):
  """Element 2i in the low nibble of byte i."""
  return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_e8m0(codes):
  return 2.0 ** (np.asarray(codes, np.float64) - 127)


# Rounding


def flush(x):
  """Subnormals read as zero of the same sign."""
  x = np.asarray(x, F32)
  return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)


def multiply(a, b):
  """One FP32 product, a subnormal result read as zero."""
  with np.errstate(over="ignore", under="ignore", invalid="ignore"):
    return flush(np.asarray(a, F32) * np.asarray(b, F32))


def divide(a, b):
  """One FP32 quotient; an infinity where b is zero."""
  with np.errstate(over="ignore", under="ignore", divide="ignore"):
    return flush(np.asarray(a, F32) / np.asarray(b, F32))


def round_bf16(x):
  """Nearest number of 8 significant bits, ties to even."""
  fraction, exponent = np.frexp(np.asarray(x, np.float64))
  with np.errstate(over="ignore"):
    rounded = np.ldexp(np.rint(fraction * 256) / 256, exponent)
  largest = (2 - 2.0**-7) * 2.0**127
  infinite = np.copysign(np.inf, rounded)
  return flush(np.where(np.abs(rounded) > largest, infinite, rounded))


def round12(x):
  """FP32 rounded to 12 significant bits, halves away from zero."""
  pattern = np.asarray(x, F32).view(np.uint32) + np.uint32(0x800)
  return (pattern & np.uint32(0xFFFFF000)).view(F32)


def clear12(x):
  """FP32 with the low 12 bits of the pattern cleared."""
  pattern = np.asarray(x, F32).view(np.uint32)
  return (pattern & np.uint32(0xFFFFF000)).view(F32)


# Block scales

RESTRICTED = np.array(
  [0.0, 2.0**-8, 2.0**-7, 1.5 * 2.0**-7]
  + [m * 2.0**e for e in range(-6, 6) for m in (1.0, 1.25, 1.5)]
  + [64.0, 80.0, 96.0]
)


def restricted_nearest(v):
  """The nearest value of the restricted grid, midpoints to the larger."""
  midpoints = (RESTRICTED[1:] + RESTRICTED[:-1]) / 2
  return RESTRICTED[np.searchsorted(midpoints, v, side="right")]


def restricted_up(v):
  """The least value of the restricted grid that is >= v."""
  return RESTRICTED[np.searchsorted(RESTRICTED, v, side="left")]


def round_scale(v, fmt, rounding):
  if fmt == "nvfp4":
    return grid("E4M3")[encode(v, "E4M3")].astype(F32)
  nearest = rounding == "rne"
  return (restricted_nearest(v) if nearest else restricted_up(v)).astype(F32)


def mx_exponent(block_amax, largest):
  """The least e >= -126 with block_amax <= 2^e * largest."""
  exponents = np.arange(-126, 128)
  bounds = 2.0**exponents * largest
  return exponents[np.searchsorted(bounds, block_amax, side="left")]


# Random Hadamard transform


def rht(x, size=16, signs=0xD7E8, stream=None):
  """Groups of `size` along the last axis, zero-padded, signed, rotated.

  `signs` None draws them from the stream: the 128 bits of a counter that no
  element has.
  """
  x = pad(flush(x), 1, size)
  if signs is None:
    k0, k1, loop = (int(word) for word in stream)
    last = 2**32 - 1
    words = philox4x32((last, last, last, loop), (k0, k1))
    bits = [int(words[i // 32]) >> i % 32 & 1 for i in range(size)]
  else:  # The page has 16 signs; longer groups repeat them.
    bits = [signs >> i % 16 & 1 for i in range(size)]
  sign = [-1.0 if bit else 1.0 for bit in bits]
  groups = x.reshape(*x.shape[:-1], -1, size) * np.array(sign, F32)
  stride = 1
  with np.errstate(over="ignore", invalid="ignore"):
    while stride < size:
      previous = groups.copy()
      for i in range(size):
        if i & stride == 0:
          a, b = previous[..., i], previous[..., i + stride]
          groups[..., i] = flush(a + b)
          groups[..., i + stride] = flush(a - b)
      stride *= 2
  scaled = multiply(groups, F32(size**-0.5))
  return round_bf16(scaled).reshape(x.shape)


# Stochastic bits


def philox4x32(counter, key):
  """Ten rounds of Philox4x32 (Salmon et al. 2011) on uint64 arrays."""
  mask = np.uint64(0xFFFFFFFF)
  shift = np.uint64(32)
  c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
  k0, k1 = (int(word) for word in key)
  for _ in range(10):
    first = np.uint64(0xD2511F53) * c0
    second = np.uint64(0xCD9E8D57) * c2
    c0, c1, c2, c3 = (
      (second >> shift) ^ c1 ^ np.uint64(k0),
      second & mask,
      (first >> shift) ^ c3 ^ np.uint64(k1),
      first & mask,
    )
    k0 = (k0 + 0x9E3779B9) % 2**32
    k1 = (k1 + 0xBB67AE85) % 2**32
  return c0, c1, c2, c3


def random_bits(stream, shape, bits=16):
  """The bits of each element of `[*batch, row, k]`, batch axes flattened."""
  k0, k1, loop = (int(word) for word in stream)
  *batch, rows, columns = shape
  per_call = 128 // bits
  n, row, k = np.indices((int(np.prod(batch)), rows, columns))
  words = philox4x32((k // per_call, row, n, np.full_like(k, loop)), (k0, k1))
  lane = k % per_call
  per_word = 32 // bits
  word = np.choose(lane // per_word, words)
  shift = (bits * (lane % per_word)).astype(np.uint64)
  return ((word >> shift) % np.uint64(2**bits)).reshape(shape)


def site_stream(key, site, operand, loop=0):
  """(k0, k1, loop) of an operand: 2 * GEMM + (0 for lhs, 1 for rhs)."""
  key = [int(word) for word in np.asarray(key).ravel()]
  if len(key) == 4:
    key = [int(word) for word in philox4x32(key, (0, 0))[:2]]
  words = philox4x32((site, operand, 0, 0x66703464), key)
  return int(words[0]), int(words[1]), loop


# Quantisation of an operand


class Quantized(NamedTuple):
  """codes [*batch, m, k] uint8, one a byte, padded to whole blocks along k;
  scales [*batch, rows of blocks, blocks] uint8 patterns, or None;
  tensor_scale [*batch] float32, [*batch, m] where rows have one each;
  values [*batch, m, k]: code * block scale."""

  codes: np.ndarray
  scales: np.ndarray | None
  tensor_scale: np.ndarray
  values: np.ndarray

  def dequantize(self):
    scale = self.tensor_scale.astype(np.float64)
    for _ in range(self.values.ndim - scale.ndim):
      scale = scale[..., None]
    return self.values * scale


def pad(x, rows, columns):
  """Zeros up to multiples of `rows` and `columns`."""
  m, k = x.shape[-2:]
  widths = [(0, 0)] * (x.ndim - 2) + [(0, -m % rows), (0, -k % columns)]
  return np.pad(x, widths)


def blocks(x, rows, columns):
  """[*batch, m, k] -> [*batch, m / rows, rows, k / columns, columns]."""
  *batch, m, k = x.shape
  return x.reshape(*batch, m // rows, rows, k // columns, columns)


def pairwise(x, axis):
  """Sum over a power of two: i and i + n/2, then i and i + n/4, ..."""
  x = np.moveaxis(x, axis, 0)
  while len(x) > 1:
    half = len(x) // 2
    x = x[:half] + x[half:]
  return x[0]


def nvfp4_candidate(x, s, s_dec, limit, bits, sr_bits):
  """Codes of blocks x for block scales s, and the decoded code * s."""
  s = s[..., :, None, :, None]
  enc = np.where(s == 0, F32(0), divide(1, multiply(s, s_dec)))
  scaled = np.clip(multiply(x, enc), -limit, limit)
  codes = np.where(s == 0, 0, encode(scaled, "E2M1", bits, sr_bits))
  return codes.astype(np.uint8), decode(codes, "E2M1") * s


def block_error(x, s_enc, decoded):
  """Squared error of a candidate in units of 1 / S_enc, one a block."""
  y = clear12(multiply(x, s_enc))
  d = clear12(flush(decoded.astype(F32) - y))
  return pairwise(pairwise(multiply(d, d), axis=-1), axis=-2)


def eden(x, s_enc, s, codes, decoded, bits):
  """The correction <y, y> / <y, Q(y)> of each block [.., 16], moved into its
  scale s, which is rounded stochastically to E4M3 by `bits`."""
  y = round12(multiply(x, s_enc))
  squares = pairwise(pairwise(multiply(y, y), axis=-1), axis=-2)
  products = multiply(y, decoded.astype(F32))
  products = pairwise(pairwise(products, axis=-1), axis=-2)
  ratio = divide(np.where(s == 0, 1, squares), np.where(s == 0, 1, products))
  corrected = np.minimum(multiply(ratio, s), F32(448))
  patterns = encode(corrected, "E4M3", bits)
  s = grid("E4M3")[patterns][..., :, None, :, None]
  codes = np.where(s == 0, np.uint8(0), codes)
  return codes, patterns, decode(codes, "E2M1") * s


def nvfp4(x, fmt, rounding, scale_guard, four_over_six, bits, sr_bits):
  """x: blocks. Returns codes, scales' patterns, S_dec, code * scale."""
  scale_max = FORMATS[fmt][2]
  exact = fmt == "nvfp4_fp8_exact"
  if exact and rounding == "rne":
    four_over_six = True
  elif four_over_six or rounding == "eden":
    scale_max = 256.0
  c = F32(1 / (6 * scale_guard))
  block_amax = np.max(np.abs(x), axis=(-3, -1), initial=0)
  amax = np.max(block_amax, axis=(-2, -1), initial=0)
  s_enc = divide(F32(6 * scale_max * scale_guard), amax)
  s_enc = np.where(amax < SMALLEST, F32(1), s_enc)
  s_dec = divide(1, s_enc)
  wide = (..., None, None, None, None)

  v = multiply(block_amax, multiply(s_enc, c)[..., None, None])
  v = np.where(block_amax < SMALLEST, F32(0), v)
  s = round_scale(np.minimum(v, scale_max), fmt, rounding)
  element_bits = None if rounding == "eden" else bits
  codes, decoded = nvfp4_candidate(x, s, s_dec[wide], 6, element_bits, sr_bits)
  if rounding == "eden":
    codes, patterns, decoded = eden(x, s_enc[wide], s, codes, decoded, bits)
    return codes, patterns, s_dec, decoded
  if four_over_six:
    v4 = np.minimum(multiply(1.5, v), 1.5 * scale_max)
    s4 = round_scale(v4, fmt, rounding)
    limit = 4 if exact else 6
    codes4, decoded4 = nvfp4_candidate(x, s4, s_dec[wide], limit, None, 16)
    error6 = block_error(x, s_enc[wide], decoded)
    error4 = block_error(x, s_enc[wide], decoded4)
    wins = error4 < error6
    s = np.where(wins, s4, s)
    wins = wins[..., :, None, :, None]
    codes = np.where(wins, codes4, codes)
    decoded = np.where(wins, decoded4, decoded)
  return codes, encode(s, "E4M3"), s_dec, decoded


def microscaling(x, element, bits, sr_bits):
  largest = ELEMENTS[element][3]
  block_amax = np.max(np.abs(x), axis=(-3, -1), initial=0).astype(np.float64)
  e = mx_exponent(block_amax, largest)
  zero = block_amax < SMALLEST
  scales = np.where(zero, 0, e + 127).astype(np.uint8)
  zero = zero[..., :, None, :, None]
  scaled = x.astype(np.float64) / 2.0 ** e[..., :, None, :, None]
  codes = np.where(zero, 0, encode(scaled, element, bits, sr_bits))
  scale = decode_e8m0(scales)[..., :, None, :, None]
  tensor_scale = np.ones(x.shape[:-4], F32)
  return codes, scales, tensor_scale, decode(codes, element) * scale


def fp8(x, element, bits, sr_bits):
  largest = F32(ELEMENTS[element][3])
  amax = np.max(np.abs(x), axis=(-2, -1), initial=0)
  s_enc = np.where(amax < SMALLEST, F32(1), divide(largest, amax))
  scaled = multiply(x, s_enc[..., None, None])
  codes = encode(scaled, element, bits, sr_bits)
  codes = np.where((amax < SMALLEST)[..., None, None], 0, codes)
  return codes, None, divide(1, s_enc), decode(codes, element)


def quantize(
  x,
  fmt="nvfp4",
  block=(1, 16),
  rounding="rne",
  rotate=None,
  scale_guard=1.0,
  four_over_six=False,
  sr_bits=16,
  row_scale=False,
  stream=None,
  rotation=None,
):
  """An operand `[*batch, m, k]` float32 as the page quantises it.

  `rotate` is None or the (size, signs) of an RHT; `stream` the three words
  that SR draws its bits from, `rotation` those of signs that are None.
  """
  rotation = stream if rotation is None else rotation
  x = rht(x, *rotate, rotation) if rotate else flush(x)
  *batch, m, k = x.shape
  element, length, _ = FORMATS[fmt]
  rows = block[0] if length else 1
  columns = length or 1
  bits = None
  if rounding == "sr":
    bits = random_bits(stream, x.shape, sr_bits)
    bits = pad(bits, rows, columns)
  if rounding == "eden":  # a number a block
    bits = random_bits(stream, (*batch, m, -(-k // columns)), sr_bits)
  if row_scale:  # each row is an operand of its own, but for its bits
    x = x[..., None, :]
    bits = None if bits is None else bits[..., None, :]
  finite = np.isfinite(x).all(axis=(-2, -1))
  x = pad(np.where(finite[..., None, None], x, F32(0)), rows, columns)
  if length is None:
    codes, scales, tensor_scale, values = fp8(x, element, bits, sr_bits)
  else:
    tiles = blocks(x, rows, columns)
    tile_bits = bits
    if rounding == "sr":
      tile_bits = blocks(bits, rows, columns)
    if fmt.startswith("mx"):
      result = microscaling(tiles, element, tile_bits, sr_bits)
    else:
      result = nvfp4(
        tiles, fmt, rounding, scale_guard, four_over_six, tile_bits, sr_bits
      )
    codes, scales, tensor_scale, values = result
  kept = x.shape[-2] if row_scale else m
  codes = codes.reshape(x.shape)[..., :kept, :].astype(np.uint8)
  values = values.reshape(x.shape)[..., :kept, :]
  codes = np.where(finite[..., None, None], codes, np.uint8(0))
  values = np.where(finite[..., None, None], values, 0.0)
  tensor_scale = np.where(finite, tensor_scale, F32(np.nan)).astype(F32)
  if row_scale:
    codes, values = codes[..., 0, :], values[..., 0, :]
    scales = None if scales is None else scales[..., 0, :]
  return Quantized(codes, scales, tensor_scale, values)


# GEMMs

ROTATE = (16, 0xD7E8)
# recipe `nvfp4`: GEMM -> (lhs, rhs); None is the same w codes, transposed.
NVFP4_RECIPE = {
  "fprop": ({}, {"block": (16, 16)}),
  "dgrad": ({"rounding": "sr"}, None),
  "wgrad": ({"rotate": ROTATE}, {"rotate": ROTATE, "rounding": "sr"}),
}


class Product(NamedTuple):
  """value: the GEMM with exact sums; magnitude: the same with |lhs| and
  |rhs|, which bounds the FP32 accumulation error: k * 2^-24 * magnitude."""

  value: np.ndarray
  magnitude: np.ndarray


def gemm(lhs, rhs):
  """lhs [m, k] times rhs [n, k] transposed, of two Quantized, float64."""
  a, b = lhs.values, np.swapaxes(rhs.values, -1, -2)
  left, right = lhs.tensor_scale, rhs.tensor_scale
  left = left[..., None] if left.ndim == a.ndim - 1 else left[..., None, None]
  right = (
    right[..., None, :] if right.ndim == b.ndim - 1 else right[..., None, None]
  )
  scale = multiply(left, right).astype(np.float64)
  return Product(a @ b * scale, np.abs(a) @ np.abs(b) * np.abs(scale))


def transpose(operand, shape):
  """A 16x16 operand read as its transpose of `shape`, the same codes."""
  turned = []
  for array in (operand.codes, operand.values):
    array = np.swapaxes(array, -1, -2)[..., : shape[-2], :]
    turned.append(pad(array, 1, 16))
  scales = np.swapaxes(operand.scales, -1, -2)
  return Quantized(turned[0], scales, operand.tensor_scale, turned[1])


def linear(x, w, g, recipe=None, key=(0, 0), site=0, loop=0):
  """fprop, dgrad and wgrad of y = x w with cotangent g.

  Args:
    x: [*b, m, k], w: [*b, k, n], g: [*b, m, n], float32.
  Returns:
    Three `Product`: y [*b, m, n], dx [*b, m, k], dw [*b, k, n].
  """
  recipe = recipe or NVFP4_RECIPE
  xt, wt, gt = (np.swapaxes(array, -1, -2) for array in (x, w, g))
  operands = {"fprop": (x, wt), "dgrad": (g, w), "wgrad": (xt, gt)}
  products = []
  for index, name in enumerate(operands):
    pair = []
    for side in (0, 1):
      options = recipe[name][side]
      if options is None:
        pair.append(transpose(quantize(wt, **recipe["fprop"][1]), w.shape))
        continue
      stream = site_stream(key, site, 2 * index + side, loop)
      array = operands[name][side]
      rotation = site_stream(key, site, 2 * index, loop)  # both sides share it
      pair.append(quantize(array, stream=stream, rotation=rotation, **options))
    products.append(gemm(*pair))
  return tuple(products)
