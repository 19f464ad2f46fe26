"""Contract (E15): softmax and loss are float32 whatever dtype the logits have.

Against float64: error below 1e-5 for a vocabulary of 50k with one dominant
logit. The output head is not quantised unless a policy asks for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import recipe
from experiments import state
from experiments.models import transformer
from tests.experiments.helpers import make_config


def _logits(dominant: float) -> jax.Array:
  logits = np.random.default_rng(0).normal(size=(4, 50_000))
  logits[:, 7] = dominant
  return jnp.asarray(logits, jnp.bfloat16)


@pytest.mark.parametrize("dominant", [0.0, 11.0, 30.0, 200.0])
@pytest.mark.parametrize("target", [7, 49_999])
def test_e15_loss_of_bf16_logits_is_that_of_float64(dominant, target):
  logits = _logits(dominant)
  exact = np.float64(logits)
  top = exact.max(axis=-1)
  total = np.log(np.exp(exact - top[:, None]).sum(axis=-1)) + top
  expected = np.mean(total - exact[:, target])
  got = state.cross_entropy(logits, jnp.full(4, target))
  assert got.dtype == jnp.float32
  assert abs(float(got) - expected) < 1e-5 * max(1, abs(expected))


def test_e15_bf16_would_fail_this_test():
  """The tolerance tells the two apart."""
  logits = _logits(11.0)
  low = -jax.nn.log_softmax(logits)[:, 7].mean()
  high = state.cross_entropy(logits, jnp.full(4, 7))
  assert abs(float(low) - float(high)) > 1e-3


def _primitives(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for value in eqn.params.values():
      for inner in jax.tree.leaves(
        value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
      ):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from _primitives(inner)


@pytest.mark.parametrize("name", ["none", "nvfp4"])
def test_e15_every_softmax_of_the_model_is_float32(name):
  """exp and log see float32 only: attention's softmax and the loss."""
  config = make_config(recipe=name, model__scan=False)
  model = transformer.from_config(config)
  loss = state.TokenLoss(recipe.quantised(model, config))
  tokens = jnp.zeros((1, 33), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  key = jax.random.key(0)
  jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(params, tokens, key)
  dtypes = [
    str(eqn.invars[0].aval.dtype)
    for eqn in _primitives(jaxpr.jaxpr)
    if eqn.primitive.name in ("exp", "log")
  ]
  assert len(dtypes) >= 5  # three blocks, and exp and log of the loss
  assert set(dtypes) == {"float32"}
