"""The train step that the benchmarks time."""

from collections.abc import Callable

import jax
import optax

OPTIMIZER = optax.adamw(1e-3)


def train_step(apply: Callable, keyed: bool) -> Callable:
  """Forward, backward and AdamW of next-token prediction, not jitted.

  Args:
    apply: variables and tokens [b, t] to logits [b, t, vocab].
    keyed: whether ``apply`` takes ``fp4_key``.

  Returns:
    A function of variables, the optimizer's state, tokens and a key to the
    loss, new variables and the new state.
  """

  def step(variables, opt_state, tokens, key):
    def loss(variables):
      options = {"fp4_key": key} if keyed else {}
      logits = apply(variables, tokens, **options)
      return optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], tokens[:, 1:]
      ).mean()

    value, grads = jax.value_and_grad(loss)(variables)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, variables)
    return value, optax.apply_updates(variables, updates), opt_state

  return step
