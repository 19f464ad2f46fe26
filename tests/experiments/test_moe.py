"""Contract: a mixture of experts is its formula, drops no token, and trains.

Bounds: float32 sums of at most 64 terms, in another order than float64's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import state
from experiments import train
from experiments.models import experts
from experiments.models import layers
import fp4jax
from tests.experiments.helpers import make_hybrid
from tests.experiments.helpers import train_losses

D, HIDDEN, COUNT = 32, 48, 6


def _mixture(per_token=2):
  return experts.Experts(
    experts=COUNT,
    per_token=per_token,
    hidden=HIDDEN,
    balance=0.5,
    out_init=layers.INIT,
    dtype=jnp.float32,
  )


def _variables(mixture, x, scale=20.0):
  """Parameters, the router's larger, so that experts differ in load."""
  params = jax.jit(mixture.init)(jax.random.key(0), x)["params"]
  return {"params": jax.tree.map(lambda v: v * scale, params)}


def _formula(params, x, per_token):
  """Token by token, in float64; and how many tokens each expert has."""
  router, up, down = (
    np.float64(params[name]["kernel"]) for name in ("router", "up", "down")
  )
  flat, loads = np.float64(x).reshape(-1, D), np.zeros(COUNT, int)
  y = np.zeros_like(flat)
  logits = flat @ router
  p = np.exp(logits - logits.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  for i, token in enumerate(flat):
    chosen = np.argsort(-p[i])[:per_token]
    for e in chosen:
      loads[e] += 1
      hidden = np.maximum(token @ up[e], 0) ** 2
      y[i] += p[i, e] / p[i, chosen].sum() * (hidden @ down[e])
  loss = COUNT * np.sum(loads / loads.sum() * p.mean(0))
  return y.reshape(x.shape), loads, loss


@pytest.mark.parametrize("per_token", [1, 2, COUNT])
def test_outputs_and_balance_are_the_formula(per_token):
  x = jax.random.normal(jax.random.key(1), (2, 9, D))
  mixture = _mixture(per_token)
  variables = _variables(mixture, x)
  y, sown = mixture.apply(variables, x, mutable=["losses"])
  want, loads, loss = _formula(variables["params"], x, per_token)
  assert loads.sum() == 18 * per_token
  np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-4 * abs(want).max())
  (got,) = sown["losses"]["balance"]
  np.testing.assert_allclose(got, 0.5 * loss, rtol=1e-5)


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_experts_without_tokens_have_no_gradient_and_spoil_none(recipe):
  """All tokens are alike, so that four of six experts get none."""
  x = jnp.tile(jax.random.normal(jax.random.key(1), (1, 1, D)), (2, 16, 1))
  mixture = _mixture()
  variables = _variables(mixture, x, scale=5.0)
  _, loads, _ = _formula(variables["params"], x, 2)
  assert (loads == 0).sum() == COUNT - 2
  apply = mixture.apply
  if recipe:
    rule = fp4jax.Rule(path="**/router/**", recipe=None)
    policy = fp4jax.Policy(rules=(rule,), default=fp4jax.recipes.nvfp4())
    quantised = fp4jax.quantize(apply, policy)
    apply = lambda v, x: quantised(v, x, fp4_key=jax.random.key(2))
  loss = lambda v: jnp.sum(jnp.square(apply(v, x)))
  grads = jax.jit(jax.grad(loss))(variables)["params"]
  for name in ("up", "down"):
    grad = np.asarray(grads[name]["kernel"])
    assert np.all(np.isfinite(grad))
    np.testing.assert_array_equal(np.any(grad, axis=(1, 2)), loads > 0)


def test_routers_stay_as_written_and_experts_are_quantised():
  config = make_hybrid(
    recipe="nvfp4", model__pattern="EEE", model__experts=COUNT
  )
  experiment = train.make_experiment(config)
  params = jax.eval_shape(experiment.initialise).params
  tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
  rows = fp4jax.coverage(experiment.apply, {"params": params}, tokens).rows
  assert {row.path for row in rows if row.fprop != "as written"} == {
    "params/blocks_1/moe/up/kernel",
    "params/blocks_1/moe/down/kernel",
  }
  assert "routers" in {row.reason for row in rows}


def test_training_adds_the_balance_loss_and_validation_does_not():
  config = make_hybrid(model__pattern="EE", model__balance=1.0, recipe="none")
  experiment = train.make_experiment(config)
  initial = jax.jit(experiment.initialise)()
  tokens = jax.random.randint(
    jax.random.key(0), experiment.tokens.shape, 0, config.data.vocab
  )
  _, measured = jax.jit(experiment.train_step)(initial, tokens)
  validation = experiment.validation_loss(initial.params, tokens)
  np.testing.assert_allclose(measured["loss"], validation, rtol=1e-3)
  # Nearly uniform at first: 1 a layer.
  np.testing.assert_allclose(measured["auxiliary_loss"], 2, rtol=0.2)
  total = state.TokenLoss(experiment.apply, auxiliary=True)(
    initial.params, tokens
  )
  np.testing.assert_allclose(
    total, validation + measured["auxiliary_loss"], rtol=1e-3
  )


@pytest.mark.slow  # nightly: test_hybrid trains it among all mixers
def test_trains_in_nvfp4_as_in_bf16():
  """As test_mamba has it; of three blocks the middle one is quantised."""
  bf16, again, nvfp4 = (
    train_losses(make_hybrid(recipe=name, model__pattern="EEE"))
    for name in ("bf16", "nvfp4", "nvfp4")
  )
  np.testing.assert_array_equal(again, nvfp4)
  assert np.any(bf16 != nvfp4)
  for losses in (bf16, nvfp4):
    assert losses[-1] < losses[0] - 0.5
  np.testing.assert_allclose(nvfp4[-1], bf16[-1], rtol=0.05)
