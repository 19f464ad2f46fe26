"""Quantised operands equal the oracle's, bit for bit.

Codes, block scales and tensor scales are compared exactly for every format,
block and rounding; so are decoded values. There is no tolerance here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import _jax
from fp4jax import block_scaled
from tests import oracle

STREAM = np.array([0x243F6A88, 0x85A308D3, 7], np.uint32)
GUARD = 16 / 17


def _operands():
  """Options of `oracle.quantize`, every format, block and rounding."""
  for block in ((1, 16), (16, 16)):
    yield {"block": block}
    yield {"block": block, "four_over_six": True}
    yield {"block": block, "scale_guard": GUARD}
    yield {"block": block, "rounding": "sr"}
    yield {"block": block, "rounding": "sr", "sr_bits": 8}
    yield {"block": block, "rounding": "sr", "scale_guard": GUARD}
    yield {"fmt": "nvfp4_fp8_exact", "block": block, "four_over_six": True}
    yield {"fmt": "nvfp4_fp8_exact", "block": block, "rounding": "sr"}
  yield {"rotate": oracle.ROTATE}
  yield {"rotate": (32, 0xD7E8), "rounding": "sr"}
  for fmt in ("mxfp4", "mxfp8", "mxfp8_e5m2"):
    yield {"fmt": fmt, "block": (1, 32)}
    yield {"fmt": fmt, "block": (1, 32), "rounding": "sr"}
  yield {"fmt": "mxfp4", "block": (32, 32), "rounding": "sr", "sr_bits": 8}
  for fmt in ("fp8_e4m3", "fp8_e5m2"):
    yield {"fmt": fmt}
    yield {"fmt": fmt, "rounding": "sr"}
  yield {"row_scale": True}
  yield {"row_scale": True, "rounding": "sr", "rotate": oracle.ROTATE}
  yield {"fmt": "nvfp4_fp8_exact", "four_over_six": True, "row_scale": True}
  yield {"fmt": "fp8_e5m2", "row_scale": True}
  yield EDEN
  yield {"rounding": "eden", "rotate": (16, 0xD7E8), "row_scale": True}


EDEN = {"rounding": "eden", "rotate": (128, None), "scale_guard": 6.073 / 6}
OPERANDS = list(_operands())
# One of each kind, for tests that compile per shape.
SOME = [
  {"block": (16, 16), "four_over_six": True},
  {"rounding": "sr", "rotate": oracle.ROTATE},
  {"fmt": "nvfp4_fp8_exact", "rounding": "sr", "sr_bits": 8},
  {"fmt": "mxfp8", "block": (1, 32)},
  {"fmt": "fp8_e5m2", "rounding": "sr"},
  {"row_scale": True, "rotate": (32, None)},
  EDEN,
]


def name(options):
  return "-".join(str(value) for value in options.values()) or "default"


def operand(options):
  """The library's operand of the oracle's options."""
  options = dict(options)
  options["format"] = options.pop("fmt", "nvfp4")
  if rotate := options.pop("rotate", None):
    options["rht"] = fp4jax.Rht(size=rotate[0], signs=rotate[1])
  return fp4jax.Operand(**options)


def quantize(x, options, **kwargs):
  stream = jnp.asarray(STREAM) if operand(options).stochastic else None
  return fp4jax.quantize_array(x, operand(options), stream, **kwargs)


def assert_same(q, expected):
  """Unpacked library operand == oracle operand."""
  oracle.same_bits(q.tensor_scale, expected.tensor_scale)
  if expected.scales is None:
    assert q.scales is None
  else:
    oracle.same_bits(q.scales, expected.scales)
  oracle.same_bits(q.codes, expected.codes)


@functools.cache
def data(m, k):
  """[25, m, k] float32: distributions, ranges, zeros, non-finite values."""
  random = np.random.default_rng(m)
  shape = (m, k)
  normal = random.standard_normal(shape)
  sign = np.sign(random.standard_normal(shape))
  head = (np.arange(m) < m // 2)[:, None]  # rows that differ from the rest
  # The RNE midpoints and grid values themselves, under S_enc = 1.
  halves = np.round(random.uniform(-24, 24, shape)) / 4
  halves[0, 0] = 2688
  halves[:, -1] = 6
  bad = [normal.copy() for _ in range(3)]
  bad[0][m // 2, k // 2] = np.nan
  bad[1][m - 1, k - 1] = np.inf
  bad[2][0, 0] = -np.inf
  arrays = [
    normal,
    random.standard_t(5, shape),
    random.laplace(size=shape),
    np.exp2(random.uniform(-30, 30, shape)) * sign,  # 60 binades
    np.exp2(random.uniform(-126, 127, shape)) * sign,  # all of FP32
    halves,
    np.round(normal * 2) / 2,
    np.ones(shape),
    np.zeros(shape),
    np.full(shape, -0.0),
    normal * (random.random(shape) < 0.1),
    -normal * (random.random(shape) < 0.5),  # with -0.0
    np.where(head, -0.0, normal),
    np.where(head, 1e-4, 1) * normal,  # subnormal and flushed scales
    np.where(head, 1e-7, 1) * normal,
    np.exp2(random.uniform(-22, 0, (m, 1))) * normal,
    normal * 2.0**-98,  # about half of the blocks below 2^-100
    normal * 2.0**-101,
    normal * 2.0**-127,
    np.where(head, 2.0**-127, 2.0**-95) * normal,
    normal * 1e37,
    np.clip(normal * 1e39, -3.4e38, 3.4e38),
    *bad,
  ]
  return np.stack(arrays).astype(np.float32)


@pytest.mark.parametrize("options", OPERANDS, ids=name)
def test_whole_blocks(options):
  """Every operand, [25, 48, 96]: a tensor scale and bits per batch element."""
  x = data(48, 96)
  q = quantize(x, options, packed=False)
  assert_same(q, oracle.quantize(x, stream=STREAM, **options))


@pytest.mark.parametrize("options", OPERANDS, ids=name)
def test_ragged_packed_bf16(options):
  """Every operand, [25, 19, 37] BF16: rows and columns end inside a block;
  codes packed."""
  x = jnp.asarray(data(19, 37), jnp.bfloat16)
  q = quantize(x, options)
  values = np.asarray(x.astype(jnp.float32))
  expected = oracle.quantize(values, stream=STREAM, **options)
  assert q.packed == (expected.codes.max() < 16)
  if q.packed:
    expected = expected._replace(codes=oracle.pack(expected.codes))
  assert_same(q, expected)


DECODED = SOME[:2] + [{"fmt": fmt, "block": (1, 32)} for fmt in oracle.FORMATS]
DECODED = [d for d in DECODED if not d.get("fmt", "").startswith("nvfp4")]


@pytest.mark.parametrize("options", DECODED, ids=name)
def test_decode(options):
  """decode() is code * block scale, exact, in FP32 and in BF16; dequantize()
  has one FP32 rounding more. What is subnormal may be flushed or not."""
  x = jnp.asarray(data(19, 37), jnp.bfloat16)
  q = quantize(x, options)
  values = np.asarray(x.astype(jnp.float32))
  expected = oracle.quantize(values, stream=STREAM, **options)
  decoded = expected.values[..., : q.shape[-1]]
  oracle.same_bits(oracle.round_bf16(decoded).astype(np.float64), decoded)
  scale = expected.tensor_scale[:, None, None]
  product = oracle.multiply(decoded.astype(np.float32), scale)
  for actual, exact in (
    (q.decode(jnp.float32), decoded.astype(np.float32)),
    (q.decode().astype(jnp.float32), decoded.astype(np.float32)),
    (q.dequantize(), product),
  ):
    oracle.same_bits(oracle.flush(actual), oracle.flush(exact))


@pytest.mark.parametrize("k", [*range(1, 34, 2), 2, 16, 32, 47, 48, 49, 64, 65])
def test_every_size(k):
  """Contraction 1 to 65, free 65 to 1, 16x16 blocks: as the padded oracle,
  whose zeros touch no amax; B01's sweep."""
  x = np.random.default_rng(k).standard_normal((66 - k, k)).astype(np.float32)
  options = {"block": (16, 16)}
  q = quantize(x, options, packed=False)
  expected = oracle.quantize(x, **options)
  assert_same(q, expected)
  assert q.shape == x.shape
  padded = oracle.pad(x, 16, 16)
  whole = oracle.quantize(padded, **options)
  oracle.same_bits(expected.codes, whole.codes[: 66 - k])
  oracle.same_bits(expected.scales, whole.scales)


@pytest.mark.parametrize("options", SOME, ids=name)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2, 3, 17)])
def test_small_and_batched(options, shape):
  """A single element; two batch axes, whose index is flattened for the bits
  and which have a tensor scale each."""
  x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
  q = quantize(x, options, packed=False)
  rows = options.get("row_scale", False)
  assert q.tensor_scale.shape == (shape[:-1] if rows else shape[:-2])
  assert_same(q, oracle.quantize(x, stream=STREAM, **options))


@pytest.mark.parametrize("options", SOME[:2], ids=name)
def test_eager_equals_jit(options):
  """The same bits op by op and in one program."""
  x = data(19, 37)[:20]
  q = quantize(x, options, packed=False)
  with jax.disable_jit():
    eager = quantize(jnp.asarray(x), options, packed=False)
  jax.tree.map(oracle.same_bits, eager, q)


@pytest.mark.parametrize("options", SOME[:4], ids=name)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a19_operand_made_in_the_same_program(options, dtype):
  """An operand that the surrounding program computes has the bits of the
  finished array: neither its rounding to BF16 nor a product is fused away.

  XLA deletes the pair f32 -> bf16 -> f32 around a BF16 operand if it can, on
  CPU too.
  """
  a, b = jnp.asarray(data(48, 96)[:2], dtype)
  finished = jax.jit(jnp.multiply)(a, b)

  @jax.jit
  def fused(a, b):
    return quantize(a * b, options, packed=False)

  stream = STREAM if "rounding" in options else None
  values = np.asarray(finished.astype(jnp.float32))
  assert_same(fused(a, b), oracle.quantize(values, stream=stream, **options))


def narrowing_casts(jaxpr):
  """Casts of floats to narrower floats in a jaxpr and those it calls."""
  found = []
  for equation in jaxpr.eqns:
    if equation.primitive.name == "convert_element_type":
      old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
      floats = all(jnp.issubdtype(d, jnp.floating) for d in (old, new))
      if floats and new.itemsize < old.itemsize:
        found.append(f"{old} to {new}")
    for value in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        found += narrowing_casts(inner)
  return found


@pytest.mark.parametrize("options", OPERANDS, ids=name)
def test_compiled_apart_or_inlined(options, monkeypatch):
  """The same bits where XLA compiles the quantiser apart, as on one CPU, and
  where it does not, as on GPUs and meshes."""
  x = np.random.default_rng(5).standard_t(5, (2, 40, 70))
  x = jnp.asarray(x, jnp.bfloat16)

  def run(x):
    q = quantize(x, options)
    return q, q.decode()

  apart = jax.jit(run)
  assert "compilation_unit" in apart.lower(x).as_text()
  expected = apart(x)
  monkeypatch.setattr(_jax, "compiles_units", lambda: False)
  jax.clear_caches()
  inlined = jax.jit(run)
  assert "compilation_unit" not in inlined.lower(x).as_text()
  for got, want in zip(
    jax.tree.leaves(inlined(x)), jax.tree.leaves(expected), strict=True
  ):
    oracle.same_bits(got.astype(jnp.float32), want.astype(jnp.float32))
  jax.clear_caches()


def test_equal_operands_are_compiled_once():
  """Operands of equal shapes are calls of one compilation unit; under a mesh,
  whose partitioner does not see into units, they are inlined."""
  x = jnp.ones((3, 32, 64))
  run = lambda x: [quantize(x[i], {}).codes for i in range(3)]
  text = jax.jit(run).lower(x).as_text()
  assert text.count("compilation_unit") == 1
  assert text.count("call @_quantize") == 3
  with jax.set_mesh(jax.make_mesh((1,), ("x",))):
    assert "compilation_unit" not in jax.jit(run).lower(x).as_text()


@pytest.mark.parametrize("options", SOME, ids=name)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(48, 80), (2, 3, 23, 37), (2, 0, 16)])
def test_joined_codes_are_the_codes(options, axis, shape):
  """Values, tensor scales, and how many bytes there are."""
  x = np.random.default_rng(0).standard_t(3, shape)
  x = jnp.asarray(x, jnp.bfloat16)
  stream = jnp.asarray(STREAM) if operand(options).stochastic else None
  joined = block_scaled.quantize_joined(x, operand(options), stream, axis=axis)
  values, tensor_scale = joined.decode()
  want = quantize(x, options, axis=axis)
  assert values.dtype == jnp.bfloat16
  oracle.same_bits(values.astype(jnp.float32), want.decode(jnp.float32))
  oracle.same_bits(tensor_scale, want.tensor_scale)
  assert joined.data.nbytes == want.nbytes
  assert joined.dtype == want.dtype


@pytest.mark.parametrize("options", OPERANDS, ids=name)
def test_a19_no_narrowing_cast(options):
  """Quantising and dequantising hold no narrowing float cast that a compiler
  could delete: roundings are integers or reduce_precision. (decode() to BF16
  casts, exactly.)"""
  for dtype in (jnp.float32, jnp.bfloat16):
    x = jax.ShapeDtypeStruct((3, 32, 48), dtype)
    trace = jax.make_jaxpr(lambda x: quantize(x, options).dequantize())
    assert narrowing_casts(trace(x).jaxpr) == []
  pair = jax.jit(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))
  control = jax.make_jaxpr(pair)(jnp.ones(3)).jaxpr
  assert narrowing_casts(control) == ["float32 to bfloat16"]


def boundaries():
  """[8, 127, 16 * 6] float32: row r of batch b has the block scale of code
  r + 1 and elements within 2 ulps of midpoint / enc, both signs; row 126
  holds the amax. Batch 0 has S_enc = 1, the others a random one.

  Returns the operand and where rounding x / (s * S_dec) instead of x * enc
  would give another code.
  """
  random = np.random.default_rng(0)
  amax = np.float32(2688) * random.uniform(0.5, 2, 8).astype(np.float32)
  amax[0] = 2688
  s_enc = np.float32(2688) / amax
  s_dec = np.float32(1) / s_enc
  s = oracle.grid("E4M3")[1:].astype(np.float32)
  per_scale = s * s_dec[:, None]
  enc = np.float32(1) / per_scale
  points = oracle.grid("E2M1")
  midpoints = ((points[1:] + points[:-1]) / 2).astype(np.float32)
  x = midpoints / enc[..., None]
  ulps = np.arange(-2, 3)
  x = (x.view(np.int32)[..., None] + ulps).astype(np.int32).view(np.float32)
  x = np.stack([x, -x], -1).reshape(8, 126, 70)
  division = x / per_scale[..., None]
  differ = oracle.encode(division, "E2M1") != oracle.encode(
    oracle.multiply(x, enc[..., None]), "E2M1"
  )
  x = np.append(x, np.zeros((8, 126, 5), np.float32), -1)
  top = np.broadcast_to(6 * per_scale[..., None, None], (8, 126, 5, 1))
  x = np.append(x.reshape(8, 126, 5, 15), top, -1).reshape(8, 126, 80)
  last = np.zeros((8, 1, 80), np.float32)
  last[:, 0, 0] = amax
  return np.append(x, last, 1).astype(np.float32), differ


def test_a07_reciprocal_at_every_boundary():
  """All 126 finite block scales, all 7 midpoints and 2 ulps around, both
  signs, 8 tensor scales: code(x * enc), as the page has it. True division
  would give other codes in some percent of these; so the search is sharp."""
  x, differ = boundaries()
  q = quantize(x, {}, packed=False)
  expected = oracle.quantize(x)
  scales = np.arange(1, 127, dtype=np.uint8)
  oracle.same_bits(
    expected.scales[:, :126], np.tile(scales[:, None], (8, 1, 5))
  )
  assert_same(q, expected)
  assert differ.mean() > 0.01
  # The bug bank's own value: scale byte 0x07, division gives 1.5.
  assert 0x07 in np.asarray(q.scales)[0]
  row = np.zeros((2, 16), np.float32)
  row[0, 0], row[1, :2] = 2688, (6 * 0.013671875, 0.02392577938735485)
  q = quantize(row, {}, packed=False)
  assert float(q.tensor_scale) == 1
  assert np.asarray(q.scales).ravel().tolist() == [0x7E, 0x07]
  assert np.asarray(q.codes)[1, 1] == 4  # 2.0


@pytest.mark.parametrize("axis", [-1, -2])
def test_b07_blocks_run_along_the_contraction(axis):
  """A 1000x outlier changes the bytes of its own block only, and that block
  is 16 elements of the contraction axis."""
  x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
  x[0, 0] = 1000 * np.abs(x).max()  # fixes the tensor scale
  spoiled = x.copy()
  spoiled[21, 38] = x[0, 0]
  before = quantize(x, {}, axis=axis, packed=False)
  after = quantize(spoiled, {}, axis=axis, packed=False)
  changed = np.asarray(before.codes) != np.asarray(after.codes)
  row, k = (21, 38) if axis == -1 else (38, 21)
  rows, columns = np.nonzero(changed)
  assert set(rows) == {row} and set(columns // 16) == {k // 16}
  assert len(columns) > 8  # the block did coarsen
  scales = np.asarray(before.scales) != np.asarray(after.scales)
  assert np.argwhere(scales).tolist() == [[row, k // 16]]
  oracle.same_bits(before.tensor_scale, np.asarray(after.tensor_scale))


@pytest.mark.parametrize("options", SOME[:2], ids=name)
def test_axis(options):
  """axis=-2 quantises the transpose and dequantises to the layout given."""
  x = data(19, 37)[0]
  q = quantize(x, options, axis=-2, packed=False)
  assert_same(q, oracle.quantize(x.T, stream=STREAM, **options))
  values = quantize(x.T.copy(), options, packed=False).dequantize()
  oracle.same_bits(q.dequantize(), np.asarray(values).T)


def tied_blocks(rows):
  """[rows, 128] float32: blocks in which amax→6 and amax→4 have the same
  errors at swapped places, so that only the order of the FP32 sum decides.

  S_enc = 1 for amax = 6 * 64, block amax 6, s6 = 1, s4 = 1.5. Between the
  grids {.., .5, 1, ..} and {.., .75, ..} a pair .5 + a and .75 + a has the
  errors (a, a - .25) and (a - .25, a). Small elements, 0 on both grids, carry
  the low bits that sums round off.
  """
  random = np.random.default_rng(0)
  shape = (rows, 8, 5)
  a = random.integers(1, 1000, shape) * 2.0**-12
  common = np.exp2(random.uniform(-9, -3, shape))
  top = np.full((rows, 8, 1), 6.0)
  x = np.concatenate([0.5 + a, 0.75 + a, common, top], -1)
  sign = random.choice([-1, 1], x.shape)
  x = random.permuted(x * sign, axis=-1).reshape(rows, 128)
  # y has 12 bits; so do the elements, that no error is rounded.
  return oracle.clear12(x.astype(np.float32))


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_fp8_exact"])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_four_over_six_sums_in_the_order_of_the_page(fmt, block):
  """Errors that are equal in exact arithmetic: the winner is whoever the
  pairwise FP32 sum makes smaller. Both win often, so any other order shows."""
  x = tied_blocks(1024)
  x[0, 0] = {"nvfp4": 6 * 256, "nvfp4_fp8_exact": 6 * 64}[fmt]
  options = {"fmt": fmt, "block": block, "four_over_six": True}
  expected = oracle.quantize(x, **options)
  assert expected.tensor_scale == 1
  wins = (expected.scales == 0x3C).mean()  # 1.5; 0x38 is 1
  losses = (expected.scales == 0x38).mean()
  assert wins > 0.05 and losses > 0.05
  assert_same(quantize(x, options, packed=False), expected)


def test_square_blocks_transpose():
  """Q(w)^T == Q(w^T) bit for bit with 16x16 blocks, also for ragged sizes and
  four over six: one set of codes serves fprop and dgrad."""
  w = data(48, 96)[:, :43, :90]
  wt = np.swapaxes(w, -1, -2)
  for options in (SOME[0], {"block": (16, 16)}):
    q = quantize(w, options, packed=False)
    qt = quantize(wt, options, packed=False)
    codes = np.swapaxes(np.asarray(q.codes)[..., :90], -1, -2)
    oracle.same_bits(codes, np.asarray(qt.codes)[..., :43])
    scales = np.swapaxes(np.asarray(q.scales), -1, -2)
    oracle.same_bits(scales, np.asarray(qt.scales))
    oracle.same_bits(q.tensor_scale, np.asarray(qt.tensor_scale))


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_idempotence(block):
  """Q(dequantize(Q(x))) == Q(x), every byte, where block scales are normal
  E4M3 numbers (elsewhere it need not hold)."""
  x = data(48, 96)[[0, 1, 2, 7]]
  q = quantize(x, {"block": block}, packed=False)
  assert (np.asarray(q.scales) >= 8).all()
  again = quantize(q.dequantize(), {"block": block}, packed=False)
  oracle.same_bits(again.codes, np.asarray(q.codes))
  oracle.same_bits(again.scales, np.asarray(q.scales))


def test_bytes():
  """A packed operand has half a byte an element, a byte a block and four for
  the tensor scale (bug bank G03)."""
  x = np.ones((64, 64), np.float32)
  assert quantize(x, {}).nbytes == 64 * 64 // 2 + 64 * 4 + 4
  assert quantize(x, {"block": (16, 16)}).nbytes == 64 * 64 // 2 + 16 + 4
  assert quantize(x, {"fmt": "mxfp8", "block": (1, 32)}).nbytes == 4096 + 132
  assert quantize(x, {"fmt": "fp8_e4m3"}).nbytes == 64 * 64 + 4


@pytest.mark.parametrize(
  "message, options",
  [
    ("needs a key", {"rounding": "sr"}),
    ("block=", {"block": (1, 32)}),
    ("four_over_six", {"rounding": "sr", "four_over_six": True}),
  ],
)
def test_refusals(message, options):
  """What the page has no meaning for raises, and names the field."""
  with pytest.raises(ValueError, match=message):
    fp4jax.quantize_array(jnp.ones((1, 16)), operand(options))
