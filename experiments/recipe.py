"""From a configuration to a policy, and from a model to a quantised one."""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
from ml_collections import ConfigDict

from experiments import errors
import fp4jax

NONE = "none"
"""The recipe of a model that fp4jax never touches."""

RECIPES = {
  "bf16": fp4jax.recipes.bf16,
  "nvfp4": fp4jax.recipes.nvfp4,
  "nvfp4_fp8_exact": fp4jax.recipes.nvfp4_fp8_exact,
  "fp8": fp4jax.recipes.fp8,
  "mxfp8": fp4jax.recipes.mxfp8,
  "mxfp4": fp4jax.recipes.mxfp4,
}

NAMES = (NONE, *RECIPES)

POLICIES = {
  "nemotron": lambda recipe, policy: fp4jax.policies.nemotron(
    first=policy.first, last=policy.last, recipe=recipe
  ),
  "all_linear": lambda recipe, policy: fp4jax.policies.all_linear(
    recipe=recipe
  ),
  "last_fraction": lambda recipe, policy: fp4jax.policies.last_fraction(
    policy.fraction, recipe=recipe
  ),
  "bf16": lambda recipe, policy: fp4jax.policies.bf16(),
}

HEALED: dict[str, dict[str, bool]] = {
  "both": {},
  "forward": {"backward": False},
  "backward": {"forward": False},
}
"""What ``config.policy.heal.gemms`` may be."""


def check(config: ConfigDict) -> None:
  """Raises ``UserError`` for a recipe or a policy that does not exist."""
  if config.recipe not in NAMES:
    raise errors.UserError(
      f"config.recipe={config.recipe!r}; needed one of {', '.join(NAMES)}."
    )
  if config.policy.name not in POLICIES:
    raise errors.UserError(
      f"config.policy.name={config.policy.name!r}; needed one of"
      f" {', '.join(POLICIES)}."
    )


# A router decides with small differences, and costs nothing.
_ROUTERS = fp4jax.Rule(
  path="**/router/**", recipe=None, optional=True, name="routers"
)


def make_policy(config: ConfigDict) -> fp4jax.Policy | None:
  """The policy of a configuration; None leaves the model untransformed.

  Routers of experts stay as written, whatever the policy says of the rest.
  """
  check(config)
  if config.recipe == NONE:
    return None
  recipe = RECIPES[config.recipe]()
  try:
    policy = POLICIES[config.policy.name](recipe, config.policy)
  except ValueError as error:
    raise errors.UserError(f"config.policy: {error}") from error
  if policy.default is None:
    return policy
  return dataclasses.replace(policy, rules=(_ROUTERS, *policy.rules))


def quantised(model: nn.Module, config: ConfigDict) -> Callable:
  """``model.apply`` under the configuration's policy.

  Returns:
    f(variables, tokens, fp4_key=None) → logits, for every recipe alike; it
    takes ``model.apply``'s keyword arguments too.
  """
  return under(model, make_policy(config))


def under(model: nn.Module, policy: fp4jax.Policy | None) -> Callable:
  """``model.apply`` under a policy; None takes the key and leaves it."""
  if policy is None:
    return lambda variables, tokens, fp4_key=None, **kwargs: model.apply(
      variables, tokens, **kwargs
    )
  return fp4jax.quantize(model.apply, policy)


def make_phases(
  config: ConfigDict,
) -> tuple[tuple[int, fp4jax.Policy | None], ...]:
  """Steps and the policies that begin there: the usual one, then the healed.

  Returns:
    Pairs of ``fp4jax.Schedule``; None in place of the recipe "none"'s policy.

  Raises:
    UserError: there is nothing to heal.
  """
  policy, heal = make_policy(config), config.policy.heal
  if not heal.fraction:
    return ((0, policy),)
  if policy is None or policy.default is None or not policy.default.quantises:
    raise errors.UserError(
      f"config.policy.heal.fraction={heal.fraction} with"
      f" config.recipe={config.recipe!r} and config.policy.name="
      f"{config.policy.name!r}, which quantise nothing; set it to 0.0."
    )
  healed = fp4jax.policies.healed(policy, **HEALED[heal.gemms])
  steps = config.train.steps
  first = steps - max(1, round(heal.fraction * steps))
  if not first:
    return ((0, healed),)
  return fp4jax.Schedule(((0, policy), (first, healed))).phases


def coverage(apply: Any, config: ConfigDict, params, tokens) -> str:
  """The table of what ``apply`` quantises, or why there is none."""
  if config.recipe == NONE:
    return "recipe none: the model as written, without fp4jax"
  return str(fp4jax.coverage(apply, {"params": params}, tokens))
