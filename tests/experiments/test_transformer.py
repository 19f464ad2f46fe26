"""Contract: the model is the Transformer that its configuration describes.

Float32 parameters and logits, causal, rotary, grouped queries; scanned, remat
and unrolled are the same function; a BF16 policy changes no bit of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import recipe
from experiments import state
from experiments.models import layers
from experiments.models import transformer
import fp4jax
from tests.experiments.helpers import make_config

TOKENS = jax.random.randint(jax.random.key(1), (2, 33), 0, 320)


def _model(**fields):
  defaults = {"model__scan": False, "model__dtype": "float32"}
  config = make_config(**(defaults | fields))
  return transformer.from_config(config), config


def _params(model):
  return jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("scan", [False, True])
def test_parameters_and_logits_are_float32(activation, scan):
  model, _ = _model(
    model__activation=activation, model__scan=scan, model__dtype="bfloat16"
  )
  shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
  assert {x.dtype for x in jax.tree.leaves(shapes)} == {np.dtype("float32")}
  logits = jax.eval_shape(model.apply, {"params": shapes}, TOKENS)
  assert logits.shape == (2, 33, 320) and logits.dtype == jnp.float32
  stacks = {"blocks"} if scan else {"blocks_0", "blocks_1", "blocks_2"}
  assert set(shapes) == {"embed", "norm", "lm_head"} | stacks
  blocks = shapes["blocks" if scan else "blocks_0"]
  names = {"up", "down"} | ({"gate"} if activation == "swiglu" else set())
  assert set(blocks["ffn"]) == names
  lead = (3,) if scan else ()
  assert blocks["attention"]["k"]["kernel"].shape == (*lead, 32, 16)
  assert shapes["lm_head"]["kernel"].shape == (32, 320)
  assert shapes["embed"]["embedding"].shape == (320, 32)
  assert not any(
    "bias" in str(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
  )


def test_logits_do_not_see_later_tokens():
  model, _ = _model()
  params = _params(model)
  before = model.apply({"params": params}, TOKENS)
  after = model.apply({"params": params}, TOKENS.at[:, 20].add(1) % 320)
  np.testing.assert_array_equal(before[:, :20], after[:, :20])
  assert np.all(np.any(before[:, 20:] != after[:, 20:], axis=-1))


@pytest.mark.slow  # nightly: four models; bits are held by test_linen
def test_scanned_and_unrolled_and_remat_are_the_same_function():
  unrolled, _ = _model()
  params = _params(unrolled)
  blocks = [params[f"blocks_{i}"] for i in range(3)]
  stacked = {k: v for k, v in params.items() if not k.startswith("blocks_")}
  stacked["blocks"] = jax.tree.map(lambda *x: jnp.stack(x), *blocks)

  def value_and_grad(model, params):
    loss = state.TokenLoss(lambda v, x, fp4_key: model.apply(v, x))
    return jax.jit(jax.value_and_grad(loss))(params, TOKENS)

  expected, expected_grads = value_and_grad(unrolled, params)
  stem = expected_grads["blocks_1"]["ffn"]["up"]["kernel"]
  for fields in (
    {"model__scan": True},
    {"model__scan": True, "model__remat": True},
  ):
    model, _ = _model(**fields)
    value, grads = value_and_grad(model, stacked)
    # Float32 sums of at most 128 terms in another order.
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    got = grads["blocks"]["ffn"]["up"]["kernel"][1]
    np.testing.assert_allclose(got, stem, rtol=1e-4, atol=1e-7)
  model, _ = _model(model__remat=True)
  value, grads = value_and_grad(model, params)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  got = grads["blocks_1"]["ffn"]["up"]["kernel"]
  np.testing.assert_allclose(got, stem, rtol=1e-4, atol=1e-7)


def test_rotation_depends_on_distance_only_and_keeps_length():
  x = jax.random.normal(jax.random.key(0), (1, 1, 1, 16))
  y = jax.random.normal(jax.random.key(1), (1, 1, 1, 16))
  rotated_x, rotated_y = (
    layers.rotate(jnp.tile(v, (1, 40, 1, 1)), 100.0)[0, :, 0] for v in (x, y)
  )
  np.testing.assert_array_equal(rotated_x[0], x[0, 0, 0])
  products = rotated_x @ rotated_y.T
  for distance in (-3, 0, 5):
    # Float32 angles up to 40 rad: 40 * 2^-24 each, of 16 products below 3.
    np.testing.assert_allclose(
      np.diagonal(products, distance),
      products.diagonal(distance)[0],
      atol=1e-4,
    )
  assert abs(products[0, 5] - products[0, 0]) > 0.1
  norms = jnp.linalg.norm(rotated_x, axis=-1)
  np.testing.assert_allclose(norms, norms[0], rtol=1e-5)


def test_rotation_is_the_published_one():
  x = np.random.default_rng(0).normal(size=(1, 7, 2, 6))
  t = np.arange(7)[None, :, None, None]
  angle = t * 50.0 ** (-2 * np.arange(3) / 6)
  z = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angle)
  expected = np.concatenate([z.real, z.imag], axis=-1)
  got = layers.rotate(jnp.asarray(x, jnp.float32), 50.0)
  np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_feed_forward_is_its_formula(activation):
  x = jax.random.normal(jax.random.key(0), (1, 4, 8))
  ffn = layers.FeedForward(
    hidden=16,
    activation=activation,
    out_init=jax.nn.initializers.normal(1.0),
    dtype=jnp.float32,
  )
  params = ffn.init(jax.random.key(1), x)
  w = {k: np.float64(v["kernel"]) for k, v in params["params"].items()}
  h = np.float64(x) @ w["up"]
  if activation == "relu2":
    h = np.maximum(h, 0) ** 2
  else:
    gate = np.float64(x) @ w["gate"]
    h = gate / (1 + np.exp(-gate)) * h
  np.testing.assert_allclose(
    ffn.apply(params, x), h @ w["down"], rtol=1e-5, atol=1e-6
  )


def test_grouped_queries_are_full_attention_with_repeated_keys():
  grouped, _ = _model(model__kv_heads=1)
  full, _ = _model(model__kv_heads=2)
  params = _params(grouped)
  repeated = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      jnp.concatenate([x, x], axis=-1) if path[-2].key in ("k", "v") else x
    ),
    params,
  )
  np.testing.assert_allclose(
    grouped.apply({"params": params}, TOKENS),
    full.apply({"params": repeated}, TOKENS),
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize(
  "scan", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_d07_bf16_policy_changes_no_bit(scan):
  """Loss and every gradient, compiled, in BF16 arithmetic."""

  def run(name):
    model, config = _model(
      recipe=name, model__scan=scan, model__dtype="bfloat16"
    )
    loss = state.TokenLoss(recipe.quantised(model, config))
    return jax.jit(jax.value_and_grad(loss))(_params(model), TOKENS)

  for a, b in zip(
    jax.tree.leaves(run("none")), jax.tree.leaves(run("bf16")), strict=True
  ):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scan", [False, True])
def test_paper_policy_quantises_the_middle_blocks_only(scan):
  model, config = _model(model__scan=scan, model__activation="swiglu")
  apply = recipe.quantised(model, config)
  shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
  coverage = fp4jax.coverage(apply, shapes, TOKENS)
  names = {"q", "k", "v", "out", "up", "gate", "down"}
  found = {(row.path, row.layers) for row in coverage.quantised}
  if scan:
    paths = {"attention/" + n for n in ("q", "k", "v", "out")}
    paths |= {"ffn/" + n for n in ("up", "gate", "down")}
    assert found == {(f"params/blocks/{path}/kernel", (1, 1)) for path in paths}
  else:
    assert {path.split("/")[1] for path, _ in found} == {"blocks_1"}
    assert {path.split("/")[3] for path, _ in found} == names
  (head,) = [row for row in coverage.rows if "lm_head" in row.path]
  assert not head.quantised
