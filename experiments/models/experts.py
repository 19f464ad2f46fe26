"""A mixture of experts without capacity: no token is ever dropped.

  p = softmax(router(x)),  T = the k experts of the largest p
  y = Σ_(e in T) p_e / (Σ_(i in T) p_i) · down_e(relu(up_e(x))²)

Tokens are sorted by expert, and each expert multiplies its own: two
``jax.lax.ragged_dot``. The router is float32 throughout.

References:
  Fedus et al., "Switch Transformers", arXiv 2101.03961 (the balance loss).
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.models import layers

Array = jax.Array


class Experts(nn.Module):
  """The mixture; sows its balance loss into the collection "losses".

  Attributes:
    experts: how many there are.
    per_token: how many of them each token goes to.
    hidden: hidden width of each.
    balance: coefficient of the balance loss.
    out_init: of the outputs' kernels.
    dtype: of the experts' arithmetic.
  """

  experts: int
  per_token: int
  hidden: int
  balance: float
  out_init: Any
  dtype: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """Args: x, [b, t, d]. Returns: [b, t, d] of ``dtype``."""
    shape, d = x.shape, x.shape[-1]
    x = x.reshape(-1, d)
    router = nn.Dense(
      self.experts,
      use_bias=False,
      kernel_init=layers.INIT,
      dtype=jnp.float32,
      precision=jax.lax.Precision.HIGHEST,
      name="router",
    )
    probabilities = nn.softmax(router(x))
    top, chosen = jax.lax.top_k(probabilities, self.per_token)
    weights = top / jnp.sum(top, axis=-1, keepdims=True)
    loss = self.balance * balance_loss(probabilities, chosen)
    self.sow("losses", "balance", loss)

    # Every pair of a token and one of its experts, by expert.
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs)
    sizes = jnp.bincount(pairs, length=self.experts)
    rows = jnp.repeat(x.astype(self.dtype), self.per_token, axis=0)
    up = _Kernel((self.experts, d, self.hidden), layers.INIT, name="up")
    down = _Kernel((self.experts, self.hidden, d), self.out_init, name="down")
    rows = _permuted(rows, order)
    hidden = jax.lax.ragged_dot(rows, up().astype(self.dtype), sizes)
    hidden = layers.squared_relu(hidden)
    rows = jax.lax.ragged_dot(hidden, down().astype(self.dtype), sizes)
    rows = _permuted(rows, jnp.argsort(order))
    rows = rows.reshape(*weights.shape, d).astype(jnp.float32)
    y = jnp.sum(rows * weights[..., None], axis=1)
    return y.astype(self.dtype).reshape(shape)


class _Kernel(nn.Module):
  """A parameter named "kernel", which weight decay knows."""

  shape: tuple[int, ...]
  init_fn: Any

  @nn.compact
  def __call__(self) -> Array:
    return self.param("kernel", self.init_fn, self.shape, jnp.float32)


def _permuted(x: Array, order: Array) -> Array:
  """x[order]; said to be a permutation, so that its gradient is one too."""
  return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


def balance_loss(probabilities: Array, chosen: Array) -> Array:
  """experts · Σ_e (share of the pairs that went to e) (mean probability of e).

  Args:
    probabilities: [tokens, experts] float32.
    chosen: [tokens, k] int, the experts that each token goes to.

  Returns:
    A float32 scalar, 1 where both are uniform. Shares have no gradient.

  >>> even = jnp.full((4, 2), 0.5)
  >>> float(balance_loss(even, jnp.array([[0], [1], [0], [1]])))
  1.0
  """
  experts = probabilities.shape[-1]
  counts = jnp.bincount(chosen.reshape(-1), length=experts)
  shares = counts.astype(jnp.float32) / chosen.size
  return experts * jnp.sum(shares * jnp.mean(probabilities, axis=0))
