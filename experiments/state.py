"""The training state and the one step that changes it.

Parameters, gradients' accumulators and Adam's moments are float32 whatever the
recipe. A step whose loss or gradient is not finite changes none of them.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import optax

import fp4jax

Array = jax.Array
Loss = Callable[[Any, Any, Array], Array]


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
class ModelLoss:
  """The loss of parameters, a batch and a key, or None, to round.

  Attributes:
    apply: the model, as ``recipe.quantised`` gives it.
    auxiliary: whether the model sows losses and these count, as in training;
      without, the loss is the cross-entropy alone.
  """

  apply: Callable
  auxiliary: bool = False

  @staticmethod
  def split(batch) -> tuple:
    """What the model reads of a batch, and the targets of its logits."""
    raise NotImplementedError

  def __call__(self, params, batch, key=None, weights=None):
    """``weights`` are what ``weight_codes`` gave, or None."""
    return self.with_parts(params, batch, key, weights)[0]

  def with_parts(self, params, batch, key=None, weights=None):
    """The loss, and the parts that it is a sum of if there are several."""
    given = {} if weights is None else {"fp4_weights": weights}
    inputs, targets = self.split(batch)
    variables = {"params": params}
    out = self.apply(variables, inputs, fp4_key=key, **given, **self._mutable)
    if not self.auxiliary:
      return cross_entropy(out, targets), {}
    logits, sown = out
    loss = cross_entropy(logits, targets)
    # Under scan a leaf holds the losses of all layers.
    auxiliary = sum(map(jnp.sum, jax.tree.leaves(sown["losses"])))
    parts = {"loss": loss, "auxiliary_loss": auxiliary}
    return loss + auxiliary, parts

  @property
  def _mutable(self) -> dict:
    return {"mutable": ["losses"]} if self.auxiliary else {}

  def weight_codes(self, params, batch):
    """The weights quantised once; None for a model as written."""
    if not isinstance(self.apply, fp4jax.Quantized):
      return None
    variables, (inputs, _) = {"params": params}, self.split(batch)
    return self.apply.weight_codes(variables, inputs, **self._mutable)

  def measures(self, params, batch, key=None) -> dict[str, Array]:
    """What is measured of a held-out batch, by name."""
    return {"validation_loss": self(params, batch, key)}


class TokenLoss(ModelLoss):
  """Of tokens, [b, t + 1]: each but the first is a target."""

  @staticmethod
  def split(batch) -> tuple:
    """[b, t] inputs and [b, t] targets."""
    return batch[:, :-1], batch[:, 1:]


class ImageLoss(ModelLoss):
  """Of a batch of ``experiments.images``: its labels are the targets."""

  @staticmethod
  def split(batch) -> tuple:
    """[b, s, s, 3] images and [b] labels."""
    return batch["images"], batch["labels"]

  def measures(self, params, batch, key=None) -> dict[str, Array]:
    """The loss, and the share of images whose likeliest class is theirs."""
    images, labels = self.split(batch)
    logits = self.apply({"params": params}, images, fp4_key=key)
    return {
      "validation_loss": cross_entropy(logits, labels),
      "validation_accuracy": jnp.mean(logits.argmax(-1) == labels),
    }


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
  model: Any,
  optimizer: optax.GradientTransformation,
  seed: int,
  inputs: jax.ShapeDtypeStruct,
) -> State:
  """The state before step 0; to be called under ``jax.jit``.

  Args:
    model: of ``models.from_config``.
    optimizer: of ``make_optimizer``.
    seed: of the parameters.
    inputs: what the model reads.
  """
  zeros = jnp.zeros(inputs.shape, inputs.dtype)
  params = model.init(make_key(seed), zeros)["params"]
  return State(jnp.int32(0), params, optimizer.init(params))


def gradients(
  loss: Loss, params: Any, batch: Any, key: Array, accumulate: int
) -> tuple[Array, Any]:
  """The loss and the gradient of ``gradients_with_parts``."""
  value, _, grads = gradients_with_parts(loss, params, batch, key, accumulate)
  return value, grads


def gradients_with_parts(
  loss: Loss, params: Any, batch: Any, key: Array, accumulate: int
) -> tuple[Array, dict[str, Array], Any]:
  """The mean loss, its parts and gradient over micro-batches, in float32.

  Args:
    loss: of parameters, batch and key.
    params: the parameters.
    batch: tree of arrays, [accumulate · b, ...].
    key: folded with the micro-batch's index.
    accumulate: number of micro-batches; the weights are quantised once for all
      of them, where the loss is a ``ModelLoss``.

  Returns:
    The loss, what ``ModelLoss.with_parts`` says that it consists of, and the
    gradient, as if of one batch.
  """
  micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
  first = jax.tree.map(lambda x: x[0], micro)
  with_parts: Callable = lambda *args: (loss(*args), {})
  names: tuple[str, ...] = ()
  if isinstance(loss, ModelLoss):
    with_parts = loss.with_parts
    names = ("loss", "auxiliary_loss") if loss.auxiliary else ()
    if accumulate > 1:
      weights = loss.weight_codes(params, first)
      with_parts = functools.partial(with_parts, weights=weights)

  def add(total, inputs):
    batch, index = inputs
    found = jax.value_and_grad(with_parts, has_aux=True)(
      params, batch, jax.random.fold_in(key, index)
    )
    added = jax.tree.map(
      lambda t, x: t + x.astype(jnp.float32) / accumulate, total, found
    )
    return added, None

  parts = dict.fromkeys(names, jnp.float32(0))
  zero = jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.float32),
    ((jnp.float32(0), parts), params),
  )
  if accumulate == 1:
    total, _ = add(zero, (first, 0))
  else:
    total, _ = jax.lax.scan(add, zero, (micro, jnp.arange(accumulate)))
  (value, parts), grads = total
  return value, parts, grads


def make_train_step(
  loss: Loss,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  *,
  seed: int,
  accumulate: int,
) -> Callable[[State, Any], tuple[State, dict[str, Array]]]:
  """A step: state and batch, [accumulate · b, ...], to state and metrics.

  Where the model sows losses, the metric "loss" is the cross-entropy, and the
  step follows its sum with "auxiliary_loss".
  """

  def train_step(state, batch):
    key = jax.random.fold_in(make_key(seed), state.step)
    value, parts, grads = gradients_with_parts(
      loss, state.params, batch, key, accumulate
    )
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
    metrics |= parts
    return State(state.step + 1, params, opt_state), metrics

  return train_step
