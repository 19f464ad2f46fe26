"""Contract: the mixture is a loop over its experts, and trains in NVFP4.

Every token reaches its experts, whatever the balance; experts without tokens
get a gradient of exactly zero. The router is float32 and never quantised; its
balance loss is trained on, reported, and no part of the validation loss.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import metrics
from experiments import state as state_lib
from experiments import train
from experiments.models import experts
import fp4jax
from tests.experiments.helpers import make_hybrid
from tests.experiments.helpers import train_losses

D, HIDDEN, COUNT = 32, 48, 4


def _mixture(per_token=2, dtype=jnp.float32, balance=0.5):
  return experts.Experts(
    experts=COUNT,
    per_token=per_token,
    hidden=HIDDEN,
    balance=balance,
    out_init=jax.nn.initializers.normal(0.1),
    dtype=dtype,
  )


def _data(seed=0, router=None, tokens=10):
  """Inputs and parameters large enough for clear choices."""
  keys = jax.random.split(jax.random.key(seed), 4)
  params = {
    "router": {"kernel": jax.random.normal(keys[0], (D, COUNT))},
    "up": {"kernel": jax.random.normal(keys[1], (COUNT, D, HIDDEN)) / D**0.5},
    "down": {"kernel": jax.random.normal(keys[2], (COUNT, HIDDEN, D)) / 8},
  }
  if router is not None:
    params["router"]["kernel"] = router
  return jax.random.normal(keys[3], (2, tokens // 2, D)), params


def _one_expert() -> jax.Array:
  """A router that sends positive tokens to experts 1 and 3."""
  return jnp.zeros((D, COUNT)).at[:, 1].set(2.0).at[:, 3].set(1.0)


def _loop(x, params, per_token):
  """Every expert on every token, in float64, and what the router chose."""
  tokens = np.float64(x).reshape(-1, D)
  w = {name: np.float64(v["kernel"]) for name, v in params.items()}
  logits = tokens @ w["router"]
  p = np.exp(logits - logits.max(axis=-1, keepdims=True))
  p /= p.sum(axis=-1, keepdims=True)
  y = np.zeros_like(tokens)
  chosen = np.argsort(-p, axis=-1)[:, :per_token]
  for i, token in enumerate(tokens):
    for e in chosen[i]:
      hidden = np.maximum(token @ w["up"][e], 0) ** 2
      y[i] += p[i, e] / p[i, chosen[i]].sum() * (hidden @ w["down"][e])
  shares = np.bincount(chosen.ravel(), minlength=COUNT) / chosen.size
  return y.reshape(x.shape), COUNT * np.sum(shares * p.mean(axis=0))


@pytest.mark.parametrize("per_token", [1, 2, COUNT])
def test_mixture_is_a_loop_over_experts(per_token):
  x, params = _data()
  y, sown = _mixture(per_token).apply({"params": params}, x, mutable=["losses"])
  want, balance = _loop(x, params, per_token)
  np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(sown["losses"]["balance"][0], 0.5 * balance, 1e-5)


def test_experts_without_tokens():
  """All tokens at two of four experts: nothing is dropped, nothing leaks."""
  x, params = _data(router=_one_expert())
  x = jnp.abs(x)
  mixture = _mixture()
  f = lambda params: mixture.apply({"params": params}, x)
  want, _ = _loop(x, params, 2)
  np.testing.assert_allclose(f(params), want, rtol=1e-4, atol=1e-5)
  grads = jax.grad(lambda params: jnp.sum(jnp.square(f(params))))(params)
  for name in ("up", "down"):
    grad = grads[name]["kernel"]
    np.testing.assert_array_equal(grad[jnp.array([0, 2])], 0.0)
    assert np.all(np.any(grad[jnp.array([1, 3])] != 0, axis=(1, 2)))


def test_experts_without_tokens_in_nvfp4():
  x, params = _data(router=_one_expert())
  x = jnp.abs(x)
  policy = fp4jax.Policy(
    rules=(fp4jax.Rule(path="**/router/**", recipe=None),),
    default=fp4jax.recipes.nvfp4(),
  )
  f = fp4jax.quantize(_mixture().apply, policy)

  def loss(params):
    y = f({"params": params}, x, fp4_key=jax.random.key(0))
    return jnp.sum(jnp.square(y))

  grads = jax.jit(jax.grad(loss))(params)
  for grad in jax.tree.leaves(grads):
    assert np.all(np.isfinite(grad))
  for name in ("up", "down"):
    grad = grads[name]["kernel"]
    np.testing.assert_array_equal(grad[jnp.array([0, 2])], 0.0)
    assert np.all(np.any(grad[jnp.array([1, 3])] != 0, axis=(1, 2)))
  want, _ = _loop(x, params, 2)
  got = np.float64(f({"params": params}, x))
  # Two products of 4 bits: 0.22 for one on N(0, 1), see test_ragged.
  assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.5


def test_gradients_are_those_of_the_dense_mixture():
  """Every expert on every token, weighted by zero where it was not chosen."""
  x, params = _data(seed=3)
  mixture = _mixture()

  def dense(params):
    tokens = x.reshape(-1, D)
    w = {name: v["kernel"] for name, v in params.items()}
    p = jax.nn.softmax(tokens @ w["router"])
    top, chosen = jax.lax.top_k(p, 2)
    kept = jnp.sum(jax.nn.one_hot(chosen, COUNT), axis=1)
    weights = p * kept / jnp.sum(top, axis=-1, keepdims=True)
    hidden = jnp.einsum("td,edh->teh", tokens, w["up"])
    hidden = jnp.square(jax.nn.relu(hidden))
    y = jnp.einsum("teh,ehd,te->td", hidden, w["down"], weights)
    return jnp.sum(jnp.square(y))

  sparse = lambda params: jnp.sum(
    jnp.square(mixture.apply({"params": params}, x))
  )
  got, want = (jax.jit(jax.grad(f))(params) for f in (sparse, dense))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    scale = np.max(np.abs(b))
    np.testing.assert_allclose(a / scale, b / scale, atol=1e-5)


def test_balance_loss_is_one_where_balanced_and_falls_along_its_gradient():
  logits = jnp.zeros((8, COUNT))
  even = jnp.arange(8)[:, None] % COUNT
  loss = lambda logits, chosen: experts.balance_loss(
    jax.nn.softmax(logits), chosen
  )
  np.testing.assert_allclose(loss(logits, even), 1.0, rtol=1e-6)
  logits = logits.at[:, 2].set(5.0)
  all_at_one = jnp.full((8, 1), 2)
  value, grad = jax.value_and_grad(loss)(logits, all_at_one)
  assert 3.8 < value < COUNT
  assert np.all(grad[:, 2] > 0) and np.all(grad[:, :2] < 0)


def test_router_is_float32_in_a_bf16_model():
  x, params = _data()
  mixture = _mixture(dtype=jnp.bfloat16)
  shapes = jax.make_jaxpr(
    lambda params, x: mixture.apply({"params": params}, x)
  )(params, x.astype(jnp.bfloat16))
  products = [eqn for eqn in shapes.eqns if eqn.primitive.name == "dot_general"]
  (router,) = products
  assert {v.aval.dtype.name for v in router.invars} == {"float32"}
  assert set(router.params["precision"]) == {jax.lax.Precision.HIGHEST}


@pytest.mark.parametrize("policy", ["all_linear", "nemotron"])
@pytest.mark.parametrize("scan", [False, True])
def test_no_policy_quantises_a_router(policy, scan):
  config = make_hybrid(
    policy__name=policy,
    model__scan=scan,
    model__pattern="E*E",
    model__repeat=3,
  )
  experiment = train.make_experiment(config)
  inputs = jax.ShapeDtypeStruct((2, 16), jnp.int32)
  params = experiment.shapes.params
  rows = fp4jax.coverage(experiment.apply, {"params": params}, inputs).rows
  routers = [row for row in rows if "/router/" in row.path]
  assert routers and not any(row.quantised for row in routers)
  assert {row.reason for row in routers} == {"routers"}
  ragged = [row for row in rows if row.kind == "ragged_dot_general"]
  assert any(row.quantised for row in ragged)


def test_trains_in_nvfp4_as_in_bf16():
  """Bounds as in test_mamba: three blocks, the last of experts quantised."""
  fields = {"model__pattern": "*EE", "policy__last": 1}
  bf16, nvfp4, again = (
    train_losses(make_hybrid(recipe=name, **fields))
    for name in ("bf16", "nvfp4", "nvfp4")
  )
  np.testing.assert_array_equal(again, nvfp4)
  assert np.any(bf16 != nvfp4)
  for losses in (bf16, nvfp4):
    assert abs(losses[0] - np.log(320)) < 0.1
    assert losses[-1] < losses[0] - 1
  np.testing.assert_allclose(nvfp4[-1], bf16[-1], rtol=0.05)


def _tokens(experiment):
  rng = np.random.default_rng(0)
  return rng.integers(0, 320, experiment.tokens.shape, dtype=np.int32)


@pytest.mark.parametrize(
  "scan", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_balance_loss_is_trained_on_and_reported(scan):
  """The loss is the sum of its parts; validation is the cross-entropy."""
  config = make_hybrid(
    recipe="none", model__pattern="EE", model__scan=scan, model__repeat=2
  )
  config.model.balance = 0.25
  config.train.accumulate = 2
  experiment = train.make_experiment(config)
  state = jax.jit(experiment.initialise)()
  tokens = _tokens(experiment)
  _, measured = jax.jit(experiment.train_step)(state, tokens)
  total, parts = jax.jit(experiment.loss.with_parts)(state.params, tokens)
  validation = jax.jit(experiment.validation_loss)(state.params, tokens)
  np.testing.assert_allclose(validation, parts["loss"], rtol=1e-6)
  np.testing.assert_allclose(total, sum(parts.values()), rtol=1e-6)
  # Four mixtures, each near 1 at the beginning, where tokens spread evenly.
  assert 0.95 < parts["auxiliary_loss"] < 1.2
  # Shares are those of a micro-batch, so that only the cross-entropy adds up.
  np.testing.assert_allclose(measured["loss"], validation, rtol=1e-5)
  np.testing.assert_allclose(
    measured["auxiliary_loss"], parts["auxiliary_loss"], rtol=0.1
  )
  value, _, grads = jax.jit(
    functools.partial(
      state_lib.gradients_with_parts, experiment.loss, accumulate=1
    )
  )(state.params, tokens, jax.random.key(0))
  np.testing.assert_allclose(value, total, rtol=1e-6)
  routers = [
    g
    for path, g in jax.tree_util.tree_leaves_with_path(grads)
    if "router" in str(path)
  ]
  assert routers and all(np.any(g != 0) for g in routers)


@pytest.mark.slow  # nightly: a run from text to result
def test_runner_trains_experts(tmp_path, cache):
  config = make_hybrid(
    recipe="nvfp4",
    data__cache=cache,
    model__scan=True,
    model__repeat=3,
    train__steps=6,
    train__accumulate=2,
  )
  result = train.run(config, tmp_path)
  records = metrics.read(tmp_path / "metrics.jsonl")
  auxiliary = [r["auxiliary_loss"] for r in records if "loss" in r]
  assert len(auxiliary) == 6 and min(auxiliary) > 0.02
  assert 0 < result.validation_loss < np.log(320) + 0.1
  assert "(ragged_dot_general)" in result.coverage
