"""On an NVIDIA GPU: what we say we quantise is what runs, with the CPU's bits.

Contract: under XLA's GPU compiler, jitted or not, quantisers give the bits of
the CPU, and quantised products differ from plain ones by the expected error
(XLA:GPU deletes plain cast pairs, so an emulated model can run unquantised:
bug bank A19). Runs are recorded in docs/performance.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Operand
from fp4jax import Rht
from fp4jax import policies
from fp4jax import recipes


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
  [("nvfp4", (0.146, 0.176, 0.166)), ("fp8", (0.0375, 0.053, 0.053))],
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
