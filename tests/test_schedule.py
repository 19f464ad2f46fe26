"""Contract of ``Schedule`` and ``policies.healed``.

A schedule is a plain value that names the policy of every step; a step compiled
for a policy is compiled once for each switch. Healing both directions gives the
bits of the model as written, gradients included; healing one leaves the bits of
a policy that quantises the other alone.
"""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import policies
from fp4jax import recipes

X = jax.random.normal(jax.random.key(0), (32, 16), jnp.bfloat16)


class Net(nn.Module):
  """Two blocks, of which the last is BF16 under POLICY, and a head."""

  @nn.compact
  def __call__(self, x):
    for i in range(2):
      layer = nn.Dense(
        16, use_bias=False, dtype=jnp.bfloat16, name=f"block_{i}"
      )
      x = nn.relu(layer(x))
    return nn.Dense(8, use_bias=False, dtype=jnp.bfloat16, name="head")(x)


PARAMS = Net().init(jax.random.key(1), X)
# Rounded to nearest: fewer operations to compile.
POLICY = policies.nemotron(
  first=0, last=1, recipe=recipes.mxfp8(), heads="**/head/**"
)


def loss(apply, params, key):
  return (apply(params, X, **key).astype(jnp.float32) ** 2).sum()


def gradient(policy, params):
  apply = fp4jax.quantize(Net().apply, policy)
  key = {"fp4_key": jax.random.key(5)}
  return jax.value_and_grad(lambda p: loss(apply, p, key))(params)


def same(a, b) -> bool:
  leaves = zip(*map(jax.tree.leaves, (a, b)), strict=True)
  return all(np.array_equal(x, y) for x, y in leaves)


def test_one_compilation_a_switch():
  """Six steps, two switches: one compilation for each phase. Healed fully, loss
  and gradient have the bits of the model as written."""
  forward = policies.healed(POLICY, backward=False)
  healed = policies.healed(POLICY)
  schedule = fp4jax.Schedule(((0, POLICY), (2, forward), (4, healed)))
  assert schedule.switches == (2, 4)
  traced = []

  def step(params, policy):
    traced.append(policy)
    return gradient(policy, params)

  compiled = jax.jit(step, static_argnames="policy")
  results = [compiled(PARAMS, schedule.at(i)) for i in range(6)]
  assert traced == [POLICY, forward, healed]
  plain = jax.jit(jax.value_and_grad(lambda p: loss(Net().apply, p, {})))
  written = plain(PARAMS)
  assert [same(r, written) for r in results] == 4 * [False] + 2 * [True]
  assert [same(r, results[0]) for r in results] == 2 * [True] + 4 * [False]


def test_full_healing_of_the_papers_recipe_needs_no_key():
  """The jaxpr of the gradient is that of the model as written: no code, no
  scale, no random bit is left."""
  policy = policies.healed(policies.all_linear())
  apply = fp4jax.quantize(Net().apply, policy)
  grad = lambda f: jax.make_jaxpr(jax.grad(lambda p: loss(f, p, {})))(PARAMS)
  dots = [str(grad(f)).count("dot_general") for f in (apply, Net().apply)]
  assert dots[0] == dots[1]
  assert "u8" not in str(grad(apply)) and "u32" not in str(grad(apply))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_one_direction(direction):
  """Healing one direction is the recipe without its products, and differs from
  the policy and from full healing."""
  recipe = recipes.mxfp8()
  gone = ("fprop",) if direction == "forward" else ("dgrad", "wgrad")
  partial = dataclasses.replace(recipe, **dict.fromkeys(gone))
  expected = policies.nemotron(
    first=0, last=1, recipe=partial, heads="**/head/**"
  )
  flags = {"forward": False, "backward": False, direction: True}
  healed = policies.healed(POLICY, **flags)
  run = jax.jit(gradient, static_argnums=0)
  result = run(healed, PARAMS)
  assert same(result, run(expected, PARAMS))
  assert not same(result, run(POLICY, PARAMS))
  assert not same(result, run(policies.healed(POLICY), PARAMS))


def test_healed_keeps_rules_and_names():
  rule = fp4jax.Rule(path="**/a/**", recipe=recipes.fp8(), gemms=("wgrad",))
  left = fp4jax.Rule(path="**/b/**", recipe=None)
  policy = fp4jax.Policy(rules=(rule, left), default=recipes.nvfp4())
  forward = policies.healed(policy, backward=False)
  assert [r.path for r in forward.rules] == ["**/a/**", "**/b/**"]
  assert forward.rules[1] == left
  assert forward.default.name == "nvfp4, fprop healed"
  assert forward.default.fprop is None
  assert forward.default.wgrad == recipes.nvfp4().wgrad
  both = policies.healed(forward)
  assert both == policies.healed(both)
  assert not both.quantises
  assert policies.healed(policies.bf16()) == policies.bf16()


def test_schedule_is_a_plain_value():
  schedule = fp4jax.Schedule([[np.int64(0), POLICY], (5, policies.bf16())])
  assert schedule == fp4jax.Schedule(((0, POLICY), (5, policies.bf16())))
  assert hash(schedule) == hash(dataclasses.replace(schedule))
  assert [schedule.at(i) == POLICY for i in (0, 4, 5, 10**9)] == [
    True,
    True,
    False,
    False,
  ]
  assert str(schedule).splitlines()[1].startswith("from step 5: ")
  assert fp4jax.Schedule(((0, POLICY), (3, POLICY))).switches == ()


@pytest.mark.parametrize(
  "phases, message",
  [
    ((), "holds no"),
    (POLICY, "holds no"),
    ((POLICY,), "is no pair"),
    (((0.5, POLICY),), "is no pair"),
    (((True, POLICY),), "is no pair"),
    (((0, recipes.nvfp4()),), "needed a Policy"),
    (((1, POLICY),), "first step is 1, needed 0"),
    (((0, POLICY), (4, POLICY), (4, POLICY)), "step 4 comes after step 4"),
    (((0, POLICY), (4, POLICY), (3, POLICY)), "step 3 comes after step 4"),
  ],
)
def test_schedules_that_cannot_be_meant(phases, message):
  with pytest.raises(ValueError, match=message):
    fp4jax.Schedule(phases)


def test_steps_that_are_none():
  schedule = fp4jax.Schedule(((0, POLICY),))
  for step in (-1, 1.0, True, jnp.int32(1)):
    with pytest.raises(ValueError, match="needed a Python int"):
      schedule.at(step)
  with pytest.raises(ValueError, match="outside of jax.jit"):
    jax.jit(lambda step: schedule.at(step).quantises)(3)


def test_healing_nothing_or_no_policy():
  with pytest.raises(ValueError, match="heal nothing"):
    policies.healed(POLICY, forward=False, backward=False)
  with pytest.raises(ValueError, match="is no Policy"):
    policies.healed(recipes.nvfp4())
