"""On an NVIDIA GPU: what we say we quantise is what runs, with the CPU's bits.

Contract: under XLA's GPU compiler, jitted or not, quantisers give the bits of
the CPU, and quantised products differ from plain ones by the expected error
(XLA:GPU deletes plain cast pairs, so an emulated model can run unquantised:
bug bank A19). Runs are recorded in docs/performance.md.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Operand
from fp4jax import Rht
from fp4jax import backends
from fp4jax import kernels
from fp4jax import policies
from fp4jax import recipes
from fp4jax import rounding
from pallas_kernels import matmul
from pallas_kernels import quantize


def gpus():
  return [d for d in jax.devices() if d.platform == "gpu"]


pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU, none is here"),
]

OPERANDS = {
  "rne": Operand(),
  "16x16": Operand(block=(16, 16)),
  "sr": Operand(rounding="sr"),
  "sr8": Operand(rounding="sr", sr_bits=8),
  "guard": Operand(rounding="sr", scale_guard=16 / 17),
  "rht": Operand(rht=Rht()),
  "rht_sr": Operand(rht=Rht(), rounding="sr"),
  "rht128": Operand(rht=Rht(size=128)),
  "four_over_six": Operand(four_over_six=True),
  "four_over_six_16x16": Operand(four_over_six=True, block=(16, 16)),
  "exact": Operand(format="nvfp4_fp8_exact", four_over_six=True),
  "exact_sr": Operand(format="nvfp4_fp8_exact", rounding="sr"),
  "mxfp4": Operand(format="mxfp4", block=(1, 32)),
  "mxfp8": Operand(format="mxfp8", block=(1, 32)),
  "mxfp8_e5m2": Operand(format="mxfp8_e5m2", block=(1, 32)),
  "fp8_e4m3": Operand(format="fp8_e4m3"),
  "fp8_e5m2_sr": Operand(format="fp8_e5m2", rounding="sr"),
  "rht128_drawn": Operand(rht=Rht(size=128, signs=None)),
  "row_scale": Operand(row_scale=True),
  "row_scale_rht_sr": Operand(row_scale=True, rht=Rht(), rounding="sr"),
  "row_scale_fp8": Operand(format="fp8_e4m3", row_scale=True),
  "eden": recipes.ms_eden().dgrad.lhs,
}


PARTS = ("codes", "scales", "tensor_scale", "decoded")


def arrays():
  """Normal, heavy-tailed, wide-ranged, tiny and special operands."""
  rng = np.random.default_rng(0)
  normal = rng.standard_normal((96, 208)).astype(np.float32)
  wide = normal * np.exp2(rng.integers(-40, 40, normal.shape))
  special = normal.copy()
  special[:, :16] = 0
  special[0, 16:32] = -0.0
  special[1] *= 1e-38
  special[2, :] = np.float32(1e-42)
  return {
    "normal": normal,
    "student": rng.standard_t(2, normal.shape).astype(np.float32),
    "wide": wide.astype(np.float32),
    "special": special,
    "mixed": (
      normal * np.exp2(rng.integers(-45, 0, normal.shape)) * 2.0**-90
    ).astype(np.float32),
    "tiny": (normal * 1e-33).astype(np.float32),
    "subnormal": (normal * 1e-40).astype(np.float32),
    "huge": (normal * 1e37).astype(np.float32),
    "nan": np.where(rng.random(normal.shape) < 1e-4, np.nan, normal).astype(
      np.float32
    ),
    "zeros": np.zeros_like(normal),
  }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPERANDS)
def test_a19_quantisers_give_the_cpu_bits(name, dtype):
  operand = OPERANDS[name]
  cpu = jax.devices("cpu")[0]

  def quantize(x, key):
    q = fp4jax.quantize_array(x, operand, key)
    return q.codes, q.scales, q.tensor_scale, q.decode(jnp.float32)

  wrong = []
  for label, x in arrays().items():
    x = jnp.asarray(x).astype(dtype)
    key = jax.random.key(7)
    jitted = jax.jit(quantize)(*jax.device_put((x, key), gpus()[0]))
    eager = quantize(*jax.device_put((x, key), gpus()[0]))
    with jax.default_device(cpu):
      on_cpu = jax.jit(quantize)(*jax.device_put((x, key), cpu))
    for how, on_gpu in (("jit", jitted), ("eager", eager)):
      for part, got, want in zip(PARTS, on_gpu, on_cpu, strict=True):
        if want is not None and not np.array_equal(
          got, want, equal_nan=got.dtype.kind == "f"
        ):
          count = int(np.sum(np.asarray(got) != np.asarray(want)))
          wrong.append(f"{label} {how} {part}: {count} of {want.size}")
  assert not wrong


@pytest.mark.parametrize("name", ["rne", "16x16", "rht_sr", "exact", "mxfp8"])
def test_a19_operand_made_in_the_same_program(name):
  """Its rounding to BF16 is not fused away before it is quantised."""
  operand, key = OPERANDS[name], jax.random.key(7)
  a, b = (jnp.asarray(arrays()[n], jnp.bfloat16) for n in ("normal", "student"))

  def quantize(x):
    q = fp4jax.quantize_array(x, operand, key)
    return q.codes, q.scales, q.tensor_scale

  finished = jax.block_until_ready(jax.jit(jnp.multiply)(a, b))
  fused = jax.jit(lambda a, b: quantize(a * b))(a, b)
  for got, want in zip(fused, quantize(finished), strict=True):
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  # Relative errors on N(0,1): the design's numerics.md, section 4, +- 5 %.
  ("recipe", "expected"),
  [
    ("nvfp4", (0.146, 0.176, 0.166)),
    ("fp8", (0.0375, 0.053, 0.053)),
    ("row_scale", (0.146, 0.176, 0.166)),
    ("scale_guard", (0.146, 0.189, 0.180)),
    ("ms_eden", (0.146, 0.1365, 0.1365)),
    ("quartet_ii", (0.123, 0.1365, 0.1365)),
  ],
)
def test_quantised_products_differ_by_the_expected_error(recipe, expected):
  recipe = getattr(recipes, recipe)()
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (2048, 1024), jnp.bfloat16)
  w = jax.random.normal(keys[1], (1024, 512), jnp.bfloat16)
  ct = jax.random.normal(keys[2], (2048, 512), jnp.bfloat16)
  f = fp4jax.quantize(lambda w, x: x @ w, policies.all_linear(recipe))

  @jax.jit
  def both(w, x, ct):
    y, vjp = jax.vjp(lambda w, x: f(w, x, fp4_key=jax.random.key(5)), w, x)
    plain, plain_vjp = jax.vjp(lambda w, x: x @ w, w, x)
    return (y, *vjp(ct)), (plain, *plain_vjp(ct))

  quantised, plain = both(w, x, ct)
  names = ("fprop", "wgrad", "dgrad")
  want = dict(zip(("fprop", "dgrad", "wgrad"), expected, strict=True))
  for name, a, b in zip(names, quantised, plain, strict=True):
    a, b = (np.asarray(v, np.float64) for v in (a, b))
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert abs(error / want[name] - 1) < 0.08, (name, error)


def test_bf16_policy_is_bit_identical():
  x = jax.random.normal(jax.random.key(0), (256, 512), jnp.bfloat16)
  w = jax.random.normal(jax.random.key(1), (512, 256), jnp.bfloat16)
  model = lambda w, x: jnp.tanh(x @ w)
  f = fp4jax.quantize(model, policies.bf16())
  np.testing.assert_array_equal(jax.jit(f)(w, x), jax.jit(model)(w, x))


# Kernels: pallas_kernels against the reference, on the same GPU.

SERVED = {
  name: operand
  for name, operand in OPERANDS.items()
  if backends.lacks_kernel(operand) is None and kernels.serves(operand, False)
}
STREAM = rounding.site_stream(jax.random.key(3), 1, 2, 3)


@functools.partial(jax.jit, static_argnames=("rows", "columns"))
def both_backends(x, rows, columns):
  """By kernels and by the reference, parts of each direction."""
  requests = [
    operand and kernels.Request(operand, packed=True, decoded=jnp.bfloat16)
    for operand in (rows, columns)
  ]
  results = kernels.quantize(x, *requests, (STREAM, STREAM))
  parts = []
  for operand, axis, got in zip(
    (rows, columns), (-1, -2), results, strict=True
  ):
    if operand is None:
      continue
    want = fp4jax.quantize_array(x, operand, STREAM, axis=axis)
    values = want.decode()
    parts += [
      (got.codes.codes, want.codes),
      (got.codes.scales, want.scales),
      (got.tensor_scale, want.tensor_scale),
      (got.decoded, values if axis == -1 else jnp.swapaxes(values, -1, -2)),
      (kernels.decode(got.codes), values),
    ]
  return parts


def assert_equal_bits(parts):
  for got, want in jax.device_get(parts):
    assert got.shape == want.shape and got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SERVED)
def test_kernels_give_the_reference_s_bits(name, dtype):
  operand = SERVED[name]
  columns = operand if kernels.serves(operand, True) else Operand()
  for kind, x in arrays().items():
    parts = both_backends(jnp.asarray(x, dtype), operand, columns)
    try:
      assert_equal_bits(parts)
    except AssertionError as error:
      raise AssertionError(f"{name}, {kind}, {dtype}") from error


@pytest.mark.parametrize(
  "shape",
  [(5, 7), (16, 16), (50, 40), (130, 257), (3, 33, 65), (1072, 2096)],
)
def test_kernels_take_any_size(shape):
  x = jax.random.t(jax.random.key(0), 3.0, shape, jnp.float32)
  rotated = Operand(rounding="sr", rht=Rht())
  assert_equal_bits(
    both_backends(x.astype("bfloat16"), Operand(rounding="sr"), rotated)
  )


def test_kernels_beyond_65535_programs_and_2_31_elements():
  """[81920, 27648] BF16: 2.3e9 elements, 4.2 GiB, both directions.

  The reference quantises the first and the last rows and columns, and those
  around element 2^31, each with an element of the whole operand's amax in it.
  """
  m, k = shape = 81920, 27648
  x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
  x = x.at[:, 0].set(8).at[0, :].set(8)  # the amax, in every part of it
  rows = kernels.Request(Operand(), packed=True)
  both = jax.jit(lambda x: kernels.quantize(x, rows, rows))
  across, down = (q.codes for q in both(x))
  middle = 2**31 // k // 16 * 16
  for start in (0, middle - 32, middle, m - 64):
    part = slice(start, start + 64)
    want = fp4jax.quantize_array(x[part], Operand())
    assert_equal_bits(
      [
        (across.codes[part], want.codes),
        (across.scales[part], want.scales),
        (across.tensor_scale, want.tensor_scale),
      ]
    )
  for start in (0, k // 2, k - 64):
    part = slice(start, start + 64)
    want = fp4jax.quantize_array(x[:, part], Operand(), axis=-2)
    assert_equal_bits(
      [
        (down.codes[part], want.codes),
        (down.scales[part], want.scales),
        (down.tensor_scale, want.tensor_scale),
      ]
    )


def test_kernels_under_a_vmap_of_70000():
  """More operands than CUDA launches programs along a batch."""
  x = jax.random.t(jax.random.key(0), 3.0, (70_000, 16, 64), jnp.float32)
  x = x.astype(jnp.bfloat16)
  request = kernels.Request(Operand(), packed=True)

  def by_kernel(x):
    q = kernels.quantize(x, request)[0].codes
    return q.codes, q.scales, q.tensor_scale, kernels.decode(q)

  def by_reference(x):
    q = fp4jax.quantize_array(x, Operand())
    return q.codes, q.scales, q.tensor_scale, q.decode()

  got, want = (jax.jit(jax.vmap(f))(x) for f in (by_kernel, by_reference))
  assert_equal_bits(list(zip(got, want, strict=True)))


@pytest.mark.parametrize("name", ["all", "residuals"])
def test_remat_of_kernels_changes_nothing(name):
  """Gradients under jax.checkpoint are those without, bit for bit."""
  x, w = (
    jax.random.normal(jax.random.key(i), (512, 512), jnp.bfloat16)
    for i in range(2)
  )
  policy = None
  if name == "residuals":
    policy = jax.checkpoint_policies.save_only_these_names(fp4jax.RESIDUAL)

  def model(w, x):
    numbers = (((1,), (0,)), ((), ()))
    for i in range(2):
      x = fp4jax.dot(
        jnp.tanh(x),
        w,
        numbers,
        recipe=recipes.nvfp4(),
        key=jax.random.key(i),
        backend="pallas",
      )
    return x.astype(jnp.float32).sum()

  got, want = (
    jax.jit(jax.grad(f, (0, 1)))(w, x)
    for f in (jax.checkpoint(model, policy=policy), model)
  )
  assert_equal_bits(list(zip(got, want, strict=True)))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_dot_by_kernels(batch):
  """The same operands; sums may run in another order."""
  m, k, n = 192, 320, 144
  keys = jax.random.split(jax.random.key(0), 3)
  x, w, g = (
    jax.random.normal(key, (*batch, *s), jnp.bfloat16)
    for key, s in zip(keys, ((m, k), (k, n), (m, n)), strict=True)
  )
  b = tuple(range(len(batch)))
  numbers = (((len(b) + 1,), (len(b),)), (b, b))
  for recipe in (recipes.nvfp4(), recipes.nvfp4_fp8_exact()):
    out = []
    for backend in ("pallas", "reference"):

      def product(x, w, backend=backend, recipe=recipe):
        return fp4jax.dot(
          x,
          w,
          numbers,
          recipe=recipe,
          key=jax.random.key(7),
          backend=backend,
          preferred_element_type=jnp.float32,
        )

      y, vjp = jax.vjp(jax.jit(product), x, w)
      out.append([y, *vjp(g.astype(jnp.float32))])
    for got, want in zip(*out, strict=True):
      want = np.asarray(want, np.float32)
      bound = 2**-7 * np.abs(want).max()  # one rounding to BF16
      assert np.abs(np.asarray(got, np.float32) - want).max() <= bound


def test_the_kernels_are_the_default_on_this_gpu():
  """And what they quantise is quantised: errors as expected, kernels inside."""
  keys = jax.random.split(jax.random.key(0), 2)
  x = jax.random.normal(keys[0], (1024, 2048), jnp.bfloat16)
  w = jax.random.normal(keys[1], (2048, 1024), jnp.bfloat16)
  numbers = (((1,), (0,)), ((), ()))

  def product(x, w):
    return fp4jax.dot(x, w, numbers, recipe=recipes.nvfp4())

  compiled = jax.jit(product).lower(x, w).compile()
  assert "mosaic_gpu" in compiled.as_text()
  y = np.asarray(compiled(x, w), np.float32)
  plain = np.asarray(x @ w, np.float32)
  error = np.linalg.norm(y - plain) / np.linalg.norm(plain)
  assert error == pytest.approx(0.146, rel=0.08)


@pytest.mark.parametrize("way", ["rne", "sr8"])
def test_blackwell_s_own_rounding_gives_the_same_codes(way):
  """Not run yet: no such GPU was at hand."""
  capability = str(getattr(gpus()[0], "compute_capability", "0.0"))
  if int(capability.split(".")[0]) < 10:
    pytest.skip(f"needs compute capability 10.0, has {capability}")
  scalars = jnp.array([100.0, 0.002, 500.0, 2.0**-100], jnp.float32)
  config = quantize.Config(rounding="rne" if way == "rne" else "sr", sr_bits=8)
  stream = jnp.arange(6, dtype=jnp.uint32) if way == "sr8" else None
  operand = quantize.Operand(config, scalars, stream)
  x = jax.random.normal(jax.random.key(0), (512, 1024), jnp.bfloat16)
  codes = [
    quantize.quantize(x, operand, None, native=native)[0].codes
    for native in ((way,), ())
  ]
  assert_equal_bits([codes])


# Products: pallas_kernels.matmul against NumPy and XLA.
hopper = pytest.mark.skipif(
  not gpus() or not str(gpus()[0].compute_capability).startswith("9."),
  reason="needs a Hopper GPU",
)
SCALES = np.array([1 / 3, 0.7], np.float32)
CONFIGS = {
  "chosen": None,
  "columns": matmul.Config(split="n", cluster="n", minor="n", width=2),
  "tall": matmul.Config(tile_m=256, tile_n=128, cluster="n", programs=6),
  "alone": matmul.Config(tile_n=128, stages=6, cluster=None, programs=5),
  "two": matmul.Config(stages=2, programs=2),
}


def operands(arrays, contract, dtype):
  """[m, k] and [n, k], as the product takes them."""
  return [
    jnp.asarray(x if axis == -1 else x.T, dtype)
    for x, axis in zip(arrays, contract, strict=True)
  ]


@hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("contract", [(-1, -1), (-2, -1), (-1, -2), (-2, -2)])
def test_products_of_small_integers_are_exact(contract, name, dtype):
  """Bit for bit: their sums are float32 numbers in whatever order."""
  rng = np.random.default_rng(0)
  a, b = (rng.integers(-4, 5, (size, 704)) for size in (1024, 1536))
  lhs, rhs = operands((a, b), contract, jnp.bfloat16)
  exact = (a @ b.T).astype(np.float32)
  for scales in (None, SCALES):
    got = matmul.matmul(
      lhs, rhs, scales, contract=contract, dtype=dtype, config=CONFIGS[name]
    )
    want = exact if scales is None else exact * SCALES[0] * SCALES[1]
    np.testing.assert_array_equal(got, jnp.asarray(want, dtype))


@hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_e4m3_integers_are_exact(dtype):
  """Sums below 2**13 are exact, though tensor cores keep 14 bits."""
  rng = np.random.default_rng(0)
  a, b = (rng.integers(-4, 5, (size, 384)) for size in (1024, 1536))
  lhs, rhs = operands((a, b), (-1, -1), jnp.float8_e4m3fn)
  got = matmul.matmul(lhs, rhs, SCALES, dtype=dtype)
  want = (a @ b.T).astype(np.float32) * SCALES[0] * SCALES[1]
  np.testing.assert_array_equal(got, jnp.asarray(want, dtype))


@hopper
@pytest.mark.parametrize(
  "operand, kept", [("bfloat16", 23), ("float8_e4m3fn", 13)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_random_numbers(operand, kept, dtype):
  """Against float64 sums of the same numbers.

  Each of k additions may lose the bits below the last that is kept, of a term
  or sum that the sum of magnitudes bounds; then come three roundings.
  """
  rng = np.random.default_rng(1)
  k = 512
  numbers = rng.standard_normal((1024, k)), rng.standard_normal((1536, k))
  lhs, rhs = operands(numbers, (-1, -1), operand)
  a, b = (np.asarray(x, np.float32).astype(np.float64) for x in (lhs, rhs))
  got = matmul.matmul(lhs, rhs, SCALES, dtype=dtype)
  factor = np.float64(SCALES[0]) * np.float64(SCALES[1])
  want = a @ b.T * factor
  last = 2.0**-8 if dtype == "bfloat16" else 0.0
  tolerance = k * 2.0**-kept * (np.abs(a) @ np.abs(b).T) * factor
  tolerance += (last + 2.0**-22) * np.abs(want)
  assert np.all(np.abs(np.asarray(got, np.float64) - want) <= tolerance)


@hopper
@pytest.mark.parametrize("contract", [(-1, -1), (-2, -1), (-1, -2), (-2, -2)])
def test_large_products_are_xla_s(contract):
  """Several tiles a program, all multiprocessors, sums that are exact."""
  m, n, k = 8192, 6144, 2048
  keys = jax.random.split(jax.random.key(0))
  a, b = (
    jax.random.randint(key, (size, k), -2, 3).astype(jnp.bfloat16)
    for key, size in zip(keys, (m, n), strict=True)
  )
  lhs, rhs = operands((a, b), contract, jnp.bfloat16)
  got = matmul.matmul(lhs, rhs, contract=contract, dtype=jnp.float32)
  want = jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.float32)
  assert bool(jnp.all(got == want))


@hopper
def test_products_under_vmap():
  rng = np.random.default_rng(0)
  a, b = (rng.integers(-4, 5, (3, size, 256)) for size in (512, 1024))
  product = jax.vmap(lambda x, y: matmul.matmul(x, y, dtype=jnp.float32))
  got = product(jnp.asarray(a, "bfloat16"), jnp.asarray(b, "bfloat16"))
  np.testing.assert_array_equal(got, np.einsum("bmk,bnk->bmn", a, b))


@hopper
def test_products_in_x64_mode():
  with jax.enable_x64(True):
    ones = jnp.ones((512, 256), "bfloat16")
    got = jax.jit(matmul.matmul)(ones, ones, jnp.array([0.5, 4], "float32"))
  np.testing.assert_array_equal(got, np.full((512, 512), 512.0, "float32"))
