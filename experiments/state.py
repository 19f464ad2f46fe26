"""The training state and the one step that changes it.

Parameters, gradients' accumulators and Adam's moments are float32 whatever the
recipe. A step whose loss or gradient is not finite changes none of them.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import optax

import fp4jax

Array = jax.Array
Loss = Callable[[Any, Array, Array], Array]


class State(NamedTuple):
  """What a step takes and returns.

  Attributes:
    step: steps taken, skipped ones included; int32.
    params: float32 tree.
    opt_state: of ``make_optimizer``; counts skipped steps.
  """

  step: Array
  params: Any
  opt_state: optax.ApplyIfFiniteState


def make_key(seed: int) -> Array:
  """The key of a seed, whatever ``jax_default_prng_impl`` says."""
  return jax.random.key(seed, impl="threefry2x32")


def cross_entropy(logits: Array, targets: Array) -> Array:
  """Mean of log Σ exp(logits) - logits[target], in float32.

  Args:
    logits: [..., vocab] float.
    targets: [...] int.

  Returns:
    A float32 scalar, in nats.

  >>> float(cross_entropy(jnp.zeros((3, 1)), jnp.zeros((3,), int)))
  0.0
  """
  logits = logits.astype(jnp.float32)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  return losses.mean()


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """The loss of parameters, tokens [b, t + 1] and a key, or None, to round.

  Attributes:
    apply: the model, as ``recipe.quantised`` gives it.
  """

  apply: Callable

  def __call__(self, params, tokens, key=None, weights=None):
    """``weights`` are what ``weight_codes`` gave, or None."""
    given = {} if weights is None else {"fp4_weights": weights}
    variables, inputs = {"params": params}, tokens[:, :-1]
    logits = self.apply(variables, inputs, fp4_key=key, **given)
    return cross_entropy(logits, tokens[:, 1:])

  def weight_codes(self, params, tokens):
    """The weights quantised once; None for a model as written."""
    if not isinstance(self.apply, fp4jax.Quantized):
      return None
    return self.apply.weight_codes({"params": params}, tokens[:, :-1])


def make_schedule(optimizer: ConfigDict, steps: int) -> optax.Schedule:
  """The learning rate as a function of the step.

  Args:
    optimizer: "cosine" decays after the warm-up; "wsd" stays at the peak and
      decays linearly over the last ``decay_fraction``.
    steps: length of the run.

  Returns:
    An optax schedule; step 0 already learns.
  """
  peak = float(optimizer.peak_lr)
  final = peak * optimizer.final_lr_fraction
  warmup = max(1, round(optimizer.warmup_fraction * steps))
  first = peak / warmup
  rise = optax.linear_schedule(first, peak, warmup - 1)
  if optimizer.schedule == "cosine":
    fall = optax.cosine_decay_schedule(
      peak, max(1, steps - warmup), optimizer.final_lr_fraction
    )
    return optax.join_schedules([rise, fall], [warmup])
  decay = max(1, round(optimizer.decay_fraction * steps))
  stable = max(warmup, steps - decay)
  fall = optax.linear_schedule(peak, final, decay)
  flat = optax.constant_schedule(peak)
  return optax.join_schedules([rise, flat, fall], [warmup, stable])


def make_optimizer(
  optimizer: ConfigDict, schedule: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
  """AdamW after clipping; kernels and embeddings decay.

  A gradient that is not finite updates nothing, the step count included.
  """

  def decays(params):
    names = {"kernel", "embedding"}
    return jax.tree_util.tree_map_with_path(
      lambda path, _: path[-1].key in names, params
    )

  adamw = optax.adamw(
    schedule,
    b1=optimizer.b1,
    b2=optimizer.b2,
    eps=optimizer.eps,
    mu_dtype=jnp.float32,
    weight_decay=optimizer.weight_decay,
    mask=decays,
  )
  clipped = optax.chain(optax.clip_by_global_norm(optimizer.clip), adamw)
  # After so many errors apply_if_finite would let one through: never here.
  return optax.apply_if_finite(clipped, max_consecutive_errors=2**31 - 2)


def initialise(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  seed: int,
  sequence: int,
) -> State:
  """The state before step 0; to be called under ``jax.jit``."""
  tokens = jnp.zeros((1, sequence), jnp.int32)
  params = model.init(make_key(seed), tokens)["params"]
  return State(jnp.int32(0), params, optimizer.init(params))


def gradients(
  loss: Loss, params: Any, tokens: Array, key: Array, accumulate: int
) -> tuple[Array, Any]:
  """The mean loss and gradient over micro-batches, in float32.

  Args:
    loss: of parameters, tokens and key.
    params: the parameters.
    tokens: [accumulate · b, t + 1] int.
    key: folded with the micro-batch's index.
    accumulate: number of micro-batches; the weights are quantised once for all
      of them, where the loss is a ``TokenLoss``.

  Returns:
    The loss and the gradient, as if of one batch.
  """
  micro = tokens.reshape(accumulate, -1, tokens.shape[-1])
  if accumulate > 1 and isinstance(loss, TokenLoss):
    weights = loss.weight_codes(params, micro[0])
    loss = functools.partial(loss, weights=weights)

  def add(total, inputs):
    tokens, index = inputs
    found = jax.value_and_grad(loss)(
      params, tokens, jax.random.fold_in(key, index)
    )
    added = jax.tree.map(
      lambda t, x: t + x.astype(jnp.float32) / accumulate, total, found
    )
    return added, None

  zero = jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.float32(0), params)
  )
  if accumulate == 1:
    total, _ = add(zero, (micro[0], 0))
  else:
    total, _ = jax.lax.scan(add, zero, (micro, jnp.arange(accumulate)))
  return total


def make_train_step(
  loss: Loss,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  *,
  seed: int,
  accumulate: int,
) -> Callable[[State, Array], tuple[State, dict[str, Array]]]:
  """A step: state and tokens [accumulate · b, t + 1] to state and metrics."""

  def train_step(state, tokens):
    key = jax.random.fold_in(make_key(seed), state.step)
    value, grads = gradients(loss, state.params, tokens, key, accumulate)
    norm = optax.tree.norm(grads)
    # One number decides for the whole tree: a loss or a norm that is not finite
    # spoils every gradient, and the optimizer then refuses them all.
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    grads = jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    skipped = opt_state.total_notfinite
    metrics = {
      "loss": value,
      "grad_norm": norm,
      "learning_rate": schedule(state.step - state.opt_state.total_notfinite),
      "skipped_steps": skipped,
      "skipped_in_a_row": opt_state.notfinite_count,
    }
    return State(state.step + 1, params, opt_state), metrics

  return train_step
