"""Contract: the hybrid is the blocks of its pattern, scanned as unrolled.

Its configurations have the sizes that they state, and nonsense is refused.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import hybrid as hybrid_config
from configs import moe as moe_config
from configs import nemotron_h_12b
from experiments import config as config_lib
from experiments import errors
from experiments import models
from experiments import train
import fp4jax
from tests.experiments.helpers import make_config
from tests.experiments.helpers import make_hybrid
from tests.experiments.helpers import train_losses

TOKENS = jax.random.randint(jax.random.key(1), (2, 21), 0, 320)


def _counts(config):
  """Parameters; linear layers; those of them in NVFP4. By shapes alone."""
  experiment = train.make_experiment(config)
  params = jax.eval_shape(experiment.initialise).params
  tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)
  rows = fp4jax.coverage(experiment.apply, {"params": params}, tokens).rows
  total = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
  linears = [row for row in rows if row.path]
  quantised = [row for row in linears if row.fprop != "as written"]
  return total, len(linears), len(quantised)


@pytest.mark.parametrize(
  "module, expected",
  [
    (hybrid_config, (33_401_632, 33, 24)),
    (moe_config, (71_174_944, 39, 24)),
    pytest.param(
      nemotron_h_12b,
      (12_310_001_152, 137, 116),
      marks=pytest.mark.slow,  # nightly: traces 62 blocks
    ),
  ],
  ids=["hybrid", "moe", "nemotron_h_12b"],
)
def test_sizes_of_the_configurations(module, expected):
  assert _counts(module.get_config()) == expected


@pytest.mark.slow  # nightly: of each mixer
def test_scanned_and_unrolled_are_the_same_function():
  fields = {
    "model__dtype": "float32",
    "model__pattern": "M*E",
    "model__repeat": 2,
  }
  unrolled, scanned = (
    models.from_config(make_hybrid(model__scan=scan, **fields))
    for scan in (False, True)
  )
  params = jax.jit(unrolled.init)(jax.random.key(0), TOKENS)["params"]
  stacked = {k: v for k, v in params.items() if not k.startswith("blocks_")}
  stacked["blocks"] = {
    f"position_{i}": jax.tree.map(
      lambda *x: jnp.stack(x), params[f"blocks_{i}"], params[f"blocks_{i + 3}"]
    )
    for i in range(3)
  }

  def run(model, params):
    def value(params):
      logits, sown = model.apply({"params": params}, TOKENS, mutable=["losses"])
      auxiliary = sum(map(jnp.sum, jax.tree.leaves(sown["losses"])))
      return jnp.mean(jnp.square(logits)) + auxiliary, auxiliary

    return jax.jit(jax.value_and_grad(value, has_aux=True))(params)

  (value, auxiliary), grads = run(unrolled, params)
  (got, got_auxiliary), got_grads = run(scanned, stacked)
  # Float32 sums of at most 128 terms in another order.
  np.testing.assert_allclose(got, value, rtol=1e-5)
  np.testing.assert_allclose(got_auxiliary, auxiliary, rtol=1e-5)
  for i in range(6):
    alone = jax.tree.leaves(grads[f"blocks_{i}"])
    together = jax.tree.leaves(got_grads["blocks"][f"position_{i % 3}"])
    for a, b in zip(alone, together, strict=True):
      atol = 1e-5 * float(jnp.abs(a).max())
      np.testing.assert_allclose(b[i // 3], a, rtol=1e-3, atol=atol)


def test_a_scanned_stack_leaves_whole_repetitions_in_bf16():
  config = make_hybrid(
    recipe="nvfp4", model__scan=True, model__pattern="M-", model__repeat=3
  )
  experiment = train.make_experiment(config)
  params = jax.eval_shape(experiment.initialise).params
  tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
  rows = fp4jax.coverage(experiment.apply, {"params": params}, tokens).rows
  quantised = [row for row in rows if row.fprop != "as written"]
  assert {row.layers for row in quantised} == {(1, 1)}
  assert {row.path.split("blocks/")[1] for row in quantised} == {
    "position_0/mamba/in_proj/kernel",
    "position_0/mamba/out_proj/kernel",
    "position_1/ffn/up/kernel",
    "position_1/ffn/down/kernel",
  }


@pytest.mark.slow  # nightly: test_mamba and test_transformer see it by mixer
def test_later_tokens_are_not_seen():
  model = models.from_config(make_hybrid(model__pattern="M*-E"))
  params = jax.jit(model.init)(jax.random.key(0), TOKENS)
  before = model.apply(params, TOKENS)
  after = model.apply(params, TOKENS.at[:, 12].add(1) % 320)
  np.testing.assert_array_equal(before[:, :12], after[:, :12])
  assert np.any(before[:, 12:] != after[:, 12:])


def test_trains_in_nvfp4_as_in_bf16():
  """All mixers, as test_mamba has it; the middle three are quantised."""
  bf16, again, nvfp4 = (
    train_losses(make_hybrid(recipe=name))
    for name in ("bf16", "nvfp4", "nvfp4")
  )
  np.testing.assert_array_equal(again, nvfp4)
  assert np.any(bf16 != nvfp4)
  for losses in (bf16, nvfp4):
    assert losses[-1] < losses[0] - 1
  np.testing.assert_allclose(nvfp4[-1], bf16[-1], rtol=0.05)


@pytest.mark.parametrize(
  "fields, said",
  [
    ({"model__pattern": "M-X"}, "has the letter 'X'"),
    ({"model__pattern": ""}, "is empty"),
    ({"model__mamba_head": 24}, "does not divide an inner width"),
    ({"model__mamba_groups": 3}, "does not divide Mamba's 4 heads"),
    ({"model__experts_per_token": 5}, "is more than config.model.experts=4"),
    ({"model__balance": -1.0}, "needed at least 0"),
    ({"model__qk_norm": False}, "is a field of the model 'transformer'"),
  ],
)
def test_what_makes_no_hybrid_is_refused(fields, said):
  with pytest.raises(errors.UserError) as caught:
    config_lib.check(make_hybrid(**fields))
  assert said in str(caught.value)


def test_a_transformer_has_no_pattern():
  with pytest.raises(
    errors.UserError, match="is a field of the model 'hybrid'"
  ):
    config_lib.check(make_config(model__pattern="MM"))
