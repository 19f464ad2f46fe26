"""Contract: one step changes the state as optax's AdamW would, or not at all.

Everything that the optimizer holds is float32 whatever the model computes in;
micro-batches add up to the batch; the learning rate follows its schedule.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import state as state_lib
from experiments import train
from experiments.models import transformer
import fp4jax
from tests.experiments.helpers import make_config


def _tokens(count: int, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(0, 320, (count, 33), dtype=np.int32)


def _floats(tree) -> set[str]:
  return {
    str(x.dtype)
    for x in jax.tree.leaves(tree)
    if jnp.issubdtype(x.dtype, jnp.floating)
  }


def _assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


# A linear model keeps these tests about the step: y = x w, nothing to compile.
def _toy(
  learning_rate=0.125, clip=1e9, loss=None, accumulate=1, dtype="float32"
):
  config = make_config(optimizer__clip=clip, optimizer__weight_decay=0.0)
  schedule = optax.constant_schedule(learning_rate)
  optimizer = state_lib.make_optimizer(config.optimizer, learning_rate)

  def toy_loss(params, tokens, key):
    del key
    return jnp.mean(
      jnp.square(tokens.astype(dtype) @ params["kernel"].astype(dtype) - 1)
    )

  step = state_lib.make_train_step(
    loss or toy_loss, optimizer, schedule, seed=0, accumulate=accumulate
  )
  params = {"kernel": jnp.ones((4, 2), jnp.float32) / 8}
  state = state_lib.State(jnp.int32(0), params, optimizer.init(params))
  return step, state


def _numbers(rows=8, seed=0) -> np.ndarray:
  return np.random.default_rng(seed).integers(-3, 4, (rows, 4))


def test_d01_dtypes_are_stable_over_micro_batches():
  """4 micro-batches of BF16 arithmetic are 2 steps: parameters move twice."""
  step, state = _toy(accumulate=2, dtype="bfloat16")
  step = jax.jit(step)
  seen = [state]
  for i in range(2):
    state, _ = step(state, _numbers(seed=i))
    seen.append(state)
  assert step._cache_size() == 1
  for before, after in zip(seen, seen[1:], strict=False):
    assert _floats(after) == {"float32"}
    assert np.any(before.params["kernel"] != after.params["kernel"])
  counts = [int(s.opt_state.inner_state[1][0].count) for s in seen]
  assert counts == [0, 1, 2]


@pytest.mark.parametrize("name", ["none", "bf16", "nvfp4", "fp8"])
def test_d03_state_is_float32_whatever_the_recipe(name):
  experiment = train.make_experiment(make_config(recipe=name))
  assert experiment.config.model.dtype == "bfloat16"
  state = experiment.shapes
  assert _floats(state.params) == {"float32"}
  adam = state.opt_state.inner_state[1][0]
  assert _floats(adam.mu) == {"float32"}
  assert _floats(adam.nu) == {"float32"}
  after, _ = jax.eval_shape(experiment.train_step, state, experiment.tokens)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == (
    jax.tree.map(lambda x: (x.shape, x.dtype), state)
  )
  key = jax.random.key(0)
  loss, grads = jax.eval_shape(
    functools.partial(state_lib.gradients, experiment.loss, accumulate=2),
    state.params,
    experiment.tokens,
    key,
  )
  assert loss.dtype == jnp.float32 and _floats(grads) == {"float32"}


def test_step_is_adamw():
  """Against Adam written out in float64, with clipping active."""
  step, state = _toy(learning_rate=0.01, clip=0.5)
  w, mu, nu = np.float64(state.params["kernel"]), 0.0, 0.0
  for t in range(1, 4):
    x = _numbers(seed=t)
    state, metrics = step(state, x)
    error = x @ w - 1
    g = 2 * x.T @ error / error.size
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-5)
    norm = np.sqrt(np.sum(g**2))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > 0.5
    g *= 0.5 / norm
    mu, nu = 0.9 * mu + 0.1 * g, 0.95 * nu + 0.05 * g**2
    w -= 0.01 * (mu / (1 - 0.9**t)) / (np.sqrt(nu / (1 - 0.95**t)) + 1e-8)
    np.testing.assert_allclose(state.params["kernel"], w, rtol=1e-4)


def test_only_kernels_and_embeddings_decay():
  config = make_config(optimizer__weight_decay=0.5)
  optimizer = state_lib.make_optimizer(config.optimizer, 0.1)
  params = {
    "a": {"kernel": jnp.ones(2), "scale": jnp.ones((3, 2))},
    "e": {"embedding": jnp.ones(2)},
  }
  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zero, optimizer.init(params), params)
  np.testing.assert_allclose(updates["a"]["kernel"], -0.05)
  np.testing.assert_allclose(updates["e"]["embedding"], -0.05)
  np.testing.assert_array_equal(updates["a"]["scale"], 0.0)


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_d09_step_that_is_not_finite_changes_nothing(bad, value):
  def loss(params, tokens, key):
    del key
    broken = jnp.where(tokens[0, 0] == 99, value, 1.0)
    if bad == "loss":
      return jnp.square(params["kernel"]).sum() + broken
    # One gradient of eight, and a loss that stays finite.
    return jnp.square(params["kernel"]).sum() + _poison(
      params["kernel"][0, 0], broken
    )

  step, state = _toy(loss=loss)
  step = jax.jit(step)
  for i in range(5):
    tokens = _numbers(seed=i)
    tokens[0, 0] = 99 if i in (2, 3) else 1
    before, (state, metrics) = state, step(state, tokens)
    inner = (before.opt_state.inner_state, state.opt_state.inner_state)
    if i in (2, 3):
      _assert_equal(before.params, state.params)
      _assert_equal(*inner)
      assert np.isfinite(metrics["loss"]) == (bad == "gradient")
    else:
      assert np.all(before.params["kernel"] != state.params["kernel"])
      assert int(inner[1][1][0].count) == int(inner[0][1][0].count) + 1
    assert int(metrics["skipped_steps"]) == [0, 0, 1, 2, 2][i]
    assert int(metrics["skipped_in_a_row"]) == [0, 0, 1, 2, 0][i]
    assert int(state.step) == i + 1


@jax.custom_vjp
def _poison(x, factor):
  """0, with gradient ``factor - 1``: not finite for a factor that is not."""
  del x, factor
  return jnp.float32(0)


_poison.defvjp(
  lambda x, factor: (jnp.float32(0), factor),
  lambda factor, g: (g * (factor - 1), jnp.zeros_like(factor)),
)


def test_d09_accumulators_are_float32():
  """256 BF16 gradients of 1 + 2^-7: BF16 sums would stop growing at 256."""

  def loss(params, tokens, key):
    del key, tokens
    return (params["kernel"].astype(jnp.bfloat16) * (1 + 2**-7)).sum()

  params = {"kernel": jnp.ones((1, 1))}
  _, grads = state_lib.gradients(
    loss, params, np.zeros((512, 4), np.int32), jax.random.key(0), 512
  )
  assert float(grads["kernel"][0, 0]) == 1 + 2**-7


@pytest.mark.slow  # nightly: in_fp4 is the harder case
def test_d11_micro_batches_add_up_to_the_batch_in_bf16_policy():
  """4 x 2 sequences against 8, in float32 arithmetic: equal within 1e-6."""
  loss, params = _transformer_loss(fp4jax.policies.bf16(), "float32")
  whole, parts = (
    _accumulated(loss, params, accumulate) for accumulate in (1, 4)
  )
  np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
  for a, b in zip(
    jax.tree.leaves(whole[1]), jax.tree.leaves(parts[1]), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.any(a != 0)


@pytest.mark.slow  # nightly: test_weight_codes has a smaller model
def test_d11_micro_batches_add_up_to_the_batch_in_fp4():
  """Nearest rounding, other scales: cosine > 0.99, norm ratio near 1."""
  x = fp4jax.Operand()
  w = fp4jax.Operand(block=(16, 16))
  recipe = fp4jax.Recipe(
    name="nearest",
    fprop=fp4jax.Gemm(lhs=x, rhs=w),
    dgrad=fp4jax.Gemm(lhs=x, rhs=w),
    wgrad=fp4jax.Gemm(lhs=x, rhs=x),
  )
  policy = fp4jax.policies.all_linear(recipe)
  loss, params = _transformer_loss(policy, "bfloat16")
  whole, parts = (
    _accumulated(loss, params, accumulate) for accumulate in (1, 4)
  )
  a, b = (
    np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])
    for _, grads in (whole, parts)
  )
  norms = np.linalg.norm(a), np.linalg.norm(b)
  assert a @ b / np.prod(norms) > 0.99
  assert abs(norms[0] / norms[1] - 1) < 0.02


def _transformer_loss(policy, dtype):
  config = make_config(model__layers=1, model__scan=False, model__dtype=dtype)
  model = transformer.from_config(config)
  tokens = jnp.zeros((1, 32), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
  return state_lib.TokenLoss(fp4jax.quantize(model.apply, policy)), params


def _accumulated(loss, params, accumulate):
  gradients = functools.partial(
    state_lib.gradients, loss, accumulate=accumulate
  )
  return jax.jit(gradients)(params, _tokens(8), jax.random.key(3))


def test_micro_batches_round_with_different_keys():
  """The same sequences twice: rounded alike, both halves would be equal."""
  seen = []

  def loss(params, tokens, key):
    seen.append(key)
    noise = jax.random.uniform(key)
    return params["kernel"].sum() * noise

  params = {"kernel": jnp.ones((1, 1))}
  key = jax.random.key(5)
  _, grads = state_lib.gradients(
    loss, params, np.zeros((4, 4), np.int32), key, 2
  )
  keys = [jax.random.fold_in(key, i) for i in range(2)]
  expected = np.mean([jax.random.uniform(k) for k in keys])
  np.testing.assert_allclose(grads["kernel"][0, 0], expected, rtol=1e-6)


def test_every_step_and_seed_rounds_with_its_own_key():
  def loss(params, tokens, key):
    del tokens
    return 0 * params["kernel"].sum() + jax.random.uniform(key)

  step, state = _toy(loss=loss)
  seen = []
  for i in range(3):
    state, metrics = step(state, _numbers())
    key = jax.random.fold_in(state_lib.make_key(0), i)
    expected = jax.random.uniform(jax.random.fold_in(key, 0))
    assert float(metrics["loss"]) == float(expected)
    seen.append(float(expected))
  assert len(set(seen)) == 3


@pytest.mark.parametrize(
  "rate", [0.125, jnp.float32(0.125), jnp.bfloat16(0.125), np.float32(0.125)]
)
def test_d13_type_of_the_learning_rate_changes_no_dtype(rate):
  step, state = _toy(learning_rate=rate)
  step = jax.jit(step)
  for i in range(2):
    state, _ = step(state, _numbers(seed=i))
  assert step._cache_size() == 1
  assert _floats(state) == {"float32"}
  reference_step, reference = _toy(learning_rate=0.125)
  for i in range(2):
    reference, _ = jax.jit(reference_step)(reference, _numbers(seed=i))
  _assert_equal(state.params, reference.params)


def _rates(steps=100, **fields):
  config = make_config(**{f"optimizer__{k}": v for k, v in fields.items()})
  schedule = state_lib.make_schedule(config.optimizer, steps)
  return np.array([float(schedule(i)) for i in range(steps + 1)])


def test_cosine_schedule():
  rates = _rates(peak_lr=1.0, final_lr_fraction=0.1, warmup_fraction=0.1)
  np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-5)
  t = np.arange(91) / 90
  expected = 0.1 + 0.9 * (1 + np.cos(np.pi * t)) / 2
  np.testing.assert_allclose(rates[10:], expected, rtol=1e-4)


def test_wsd_schedule():
  rates = _rates(
    schedule="wsd",
    peak_lr=1.0,
    final_lr_fraction=0.01,
    warmup_fraction=0.05,
    decay_fraction=0.2,
  )
  np.testing.assert_allclose(rates[:5], np.arange(1, 6) / 5, rtol=1e-5)
  np.testing.assert_array_equal(rates[5:81], 1.0)
  np.testing.assert_allclose(
    rates[80:], 1 - 0.99 * np.arange(21) / 20, rtol=1e-4, atol=1e-6
  )


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_schedules(schedule, steps):
  rates = _rates(steps, schedule=schedule, peak_lr=1.0)[:steps]
  assert np.all((rates > 0) & (rates <= 1)) and rates[0] > 0


def test_compiled_step_compiles_once_and_donates():
  """Another shape raises instead of compiling again."""
  experiment = train.make_experiment(make_config(recipe="none"))
  compiled, _ = train._compile(experiment, experiment.phases[0])
  state = jax.jit(experiment.initialise)()
  held = state.params["lm_head"]["kernel"]
  state, _ = compiled(state, _tokens(4))
  state, _ = compiled(state, _tokens(4, seed=1))
  assert int(state.step) == 2
  assert held.is_deleted()
  with pytest.raises(TypeError, match="int32"):
    compiled(state, _tokens(5))
