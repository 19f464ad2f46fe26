"""Weights that are quantised once for several calls.

Contract: a call with codes gives the bits of one without, and its gradients;
the weights themselves are then not read; codes of another model or policy are
refused.
"""

import dataclasses

from flax import linen as nn
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import policies
from fp4jax import recipes

KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(0), (64, 32))


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    h = nn.Dense(64, use_bias=False, name="up")(x)
    return x + nn.Dense(32, use_bias=False, name="down")(nn.relu(h)), None


class Net(nn.Module):
  """A rematerialised scan, two layers of one operand, and a head."""

  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      nn.remat(Block),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=4,
    )
    x, _ = stack(name="blocks")(x, None)
    q, k = (nn.Dense(32, use_bias=False, name=name)(x) for name in "qk")
    return nn.Dense(16, use_bias=False, name="head")(q * k)


PARAMS = Net().init(jax.random.key(1), X)


def same(a, b) -> bool:
  leaves = zip(*map(jax.tree.leaves, (a, b)), strict=True)
  return all(np.array_equal(x, y) for x, y in leaves)


def gradient(f):
  def loss(params, x, weights=None):
    return (f(params, x, fp4_key=KEY, fp4_weights=weights) ** 2).sum()

  return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize(
  "policy, places",
  [
    pytest.param(
      policies.all_linear(),
      ["blocks/down[0]", "blocks/up[0]", "head", "k", "q"],
      marks=pytest.mark.slow,  # nightly: a simpler case than the other
    ),
    (  # the first and the last block are BF16: the scan is in three parts
      policies.nemotron(first=1, last=1, heads="**/head/**"),
      ["blocks/down[1]", "blocks/up[1]", "k", "q"],
    ),
  ],
  ids=["all", "split"],
)
def test_calls_with_codes_are_those_without(policy, places):
  f = fp4jax.quantize(Net().apply, policy)
  codes = f.weight_codes(PARAMS, jax.ShapeDtypeStruct(X.shape, X.dtype))
  found = [p.split("params/")[1].replace("/kernel", "") for p in codes]
  assert sorted(found) == places
  grad = gradient(f)
  want = grad(PARAMS, X)
  assert same(grad(PARAMS, X, codes), want)
  assert same(f(PARAMS, X, fp4_weights=codes), f(PARAMS, X))
  # Half a byte an element, a scale of 16 x 16, and a tensor scale.
  kernels = 4 * 2 * 32 * 64 if len(places) == 5 else 2 * 2 * 32 * 64
  kernels += 2 * 32 * 32 + (32 * 16 if "head" in places else 0)
  bytes_ = sum(x.nbytes for x in jax.tree.leaves(codes))
  assert kernels / 2 < bytes_ < kernels * (1 / 2 + 1 / 64)


def test_weights_with_codes_are_not_read():
  """So they are not quantised again."""
  f = fp4jax.quantize(Net().apply, policies.all_linear())
  codes = f.weight_codes(PARAMS, X)
  garbage = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), PARAMS)
  assert same(gradient(f)(garbage, X, codes), gradient(f)(PARAMS, X))


def test_gradient_accumulation():
  f = fp4jax.quantize(Net().apply, policies.all_linear())
  micro = X.reshape(2, 32, 32)

  @jax.jit
  def accumulated(params, micro):
    codes = f.weight_codes(params, micro[0])

    def add(total, x):
      _, found = gradient(f)(params, x, codes)
      return jax.tree.map(jnp.add, total, found), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, params), micro)[0]

  want = [gradient(f)(PARAMS, x)[1] for x in micro]
  want = jax.tree.map(jnp.add, *want)
  got = accumulated(PARAMS, micro)
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_nnx():
  model = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0))
  f = fp4jax.quantize(lambda model, x: model(x), policies.all_linear())
  codes = f.weight_codes(model, X)
  assert same(f(model, X, fp4_weights=codes), f(model, X))


def test_what_is_in_a_conditional_is_quantised_there():
  """Nor is what a scan does not divide stacked, once for each iteration."""

  def model(params, x):
    w, v = params
    x = lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ (2 * w))
    x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ v), None), x, length=3)
    return x @ w

  w, v = (jax.random.normal(jax.random.key(i), (32, 32)) for i in (1, 2))
  f = fp4jax.quantize(model, policies.all_linear())
  codes = f.weight_codes((w, v), X)
  assert len(codes) == 1
  assert same(f((w, v), X, fp4_weights=codes), f((w, v), X))


def test_codes_of_something_else_are_refused():
  f = fp4jax.quantize(Net().apply, policies.all_linear())
  other = fp4jax.quantize(lambda w, x: x @ w, policies.all_linear())
  w = jnp.ones((32, 8))
  for codes in (other.weight_codes(w, X), {"a": 1}, {}):
    with pytest.raises(ValueError, match=r"needed those of.*weight_codes"):
      f(PARAMS, X, fp4_weights=codes)
  with pytest.raises(ValueError, match=r"uint8\[.*needed arrays=.*uint8\["):
    other(w, X, fp4_weights=other.weight_codes(jnp.ones((32, 16)), X))
  with pytest.raises(ValueError, match="codes of weights"):
    f(PARAMS, X, fp4_weights=PARAMS["params"]["head"]["kernel"])


@pytest.mark.parametrize(
  "change, message",
  [
    ({"four_over_six": True}, r"four_over_six=\[True.*needed.*=\[False"),
    ({"scale_guard": 0.75}, r"scale_guard=\[0.75.*needed.*=\[1.0"),
    ({"format": "nvfp4_fp8_exact"}, "format=.*fp8_exact.*needed"),
  ],
  ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_codes_of_another_recipe_are_refused(change, message):
  """Whatever they are alike in: their shapes and dtypes are the same."""
  recipe = recipes.nvfp4()
  rhs = dataclasses.replace(recipe.fprop.rhs, **change)
  other = dataclasses.replace(
    recipe,
    fprop=dataclasses.replace(recipe.fprop, rhs=rhs),
    dgrad=dataclasses.replace(recipe.dgrad, rhs=rhs),
  )
  f, g = (
    fp4jax.quantize(Net().apply, policies.all_linear(recipe=r))
    for r in (recipe, other)
  )
  with pytest.raises(ValueError, match=message):
    f(PARAMS, X, fp4_weights=g.weight_codes(PARAMS, X))


def test_codes_of_another_backend_are_refused_by_name():
  """On a CPU the reference joins what the kernels keep apart."""
  model = lambda w, x: x @ w
  w = jnp.ones((32, 8))
  by_kernels = fp4jax.quantize(
    model, policies.all_linear(), backend="pallas_interpret"
  )
  f = fp4jax.quantize(model, policies.all_linear(), backend="reference")
  with pytest.raises(ValueError, match="layout=.*needed.*this backend"):
    f(w, X, fp4_weights=by_kernels.weight_codes(w, X))
