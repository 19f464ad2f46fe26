"""A decoder-only Transformer.

Pre-norm blocks of grouped-query attention with rotary embeddings and a squared
ReLU or SwiGLU feed-forward; RMSNorm, no biases, untied head. Parameters are
float32, arithmetic is ``dtype``, norms' statistics, softmax and logits float32.
The backward pass keeps what norms and activations read, and computes the rest
again.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import Literal

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

Array = jax.Array

_INIT = nn.initializers.normal(0.02)

# In the backward pass computed again from its input in ``dtype``: it would keep
# three arrays of float32.
RMSNorm = nn.remat(nn.RMSNorm)


class Transformer(nn.Module):
  """Next-token logits of a sequence of tokens.

  Attributes:
    vocab: number of tokens.
    layers: number of blocks.
    d: width.
    heads: query heads.
    kv_heads: key and value heads, a divisor of ``heads``.
    ffn: hidden width of the feed-forward.
    activation: "relu2" or "swiglu".
    qk_norm: normalises queries and keys.
    rope_base: the slowest rotation's wavelength over 2π.
    scan: one scanned stack named ``blocks``, rather than ``blocks_0``, ...
    remat: recomputes each block in the backward pass.
    dtype: of the arithmetic.
    attention: ``jax.nn.dot_product_attention``'s implementation; None for
      blocks of a feed-forward alone.
    remat_policy: what ``remat`` saves, a policy of ``jax.checkpoint``.
    dot_general_cls: Flax's, of the blocks' linear layers; it may draw from the
      random stream "rounding".
  """

  vocab: int
  layers: int
  d: int
  heads: int
  kv_heads: int
  ffn: int
  activation: str = "relu2"
  qk_norm: bool = True
  rope_base: float = 10_000.0
  scan: bool = False
  remat: bool = False
  dtype: Any = jnp.bfloat16
  attention: Literal["xla", "cudnn"] | None = "xla"
  remat_policy: Callable[..., bool] | None = None
  dot_general_cls: Any = None

  @nn.compact
  def __call__(self, tokens: Array) -> Array:
    """Args: tokens, [b, t] int. Returns: logits, [b, t, vocab] float32."""
    embed = nn.Embed(
      self.vocab,
      self.d,
      embedding_init=_INIT,
      dtype=self.dtype,
      name="embed",
    )
    x = embed(tokens)
    block_class = Block
    if self.remat:
      block_class = nn.remat(
        Block, prevent_cse=not self.scan, policy=self.remat_policy
      )
    block = functools.partial(
      block_class,
      layers=self.layers,
      heads=self.heads,
      kv_heads=self.kv_heads,
      ffn=self.ffn,
      activation=self.activation,
      qk_norm=self.qk_norm,
      rope_base=self.rope_base,
      dtype=self.dtype,
      attention=self.attention,
      dot_general_cls=self.dot_general_cls,
    )
    if self.scan:
      stack = nn.scan(
        lambda block, x, _: (block(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True, "rounding": True},
        length=self.layers,
      )
      x, _ = stack(block(name="blocks"), x, None)
    else:
      for i in range(self.layers):
        x = block(name=f"blocks_{i}")(x)
    x = RMSNorm(dtype=self.dtype, name="norm")(x)
    head = nn.Dense(
      self.vocab,
      use_bias=False,
      kernel_init=_INIT,
      dtype=self.dtype,
      dot_general=_dot_general_f32,
      name="lm_head",
    )
    return head(x)


class Block(nn.Module):
  """x + attention(norm(x)), then x + ffn(norm(x))."""

  layers: int
  heads: int
  kv_heads: int
  ffn: int
  activation: str
  qk_norm: bool
  rope_base: float
  dtype: Any
  attention: Literal["xla", "cudnn"] | None
  dot_general_cls: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    # Both branches end small, so that depth does not grow the residual stream.
    out_init = nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5)
    feed_forward = FeedForward(
      hidden=self.ffn,
      activation=self.activation,
      out_init=out_init,
      dtype=self.dtype,
      dot_general_cls=self.dot_general_cls,
      name="ffn",
    )
    if self.attention is not None:
      attention = Attention(
        heads=self.heads,
        kv_heads=self.kv_heads,
        qk_norm=self.qk_norm,
        rope_base=self.rope_base,
        out_init=out_init,
        dtype=self.dtype,
        implementation=self.attention,
        dot_general_cls=self.dot_general_cls,
        name="attention",
      )
      x = x + attention(RMSNorm(dtype=self.dtype, name="attention_norm")(x))
    return x + feed_forward(RMSNorm(dtype=self.dtype, name="ffn_norm")(x))


class Attention(nn.Module):
  """Causal grouped-query attention with rotary embeddings."""

  heads: int
  kv_heads: int
  qk_norm: bool
  rope_base: float
  out_init: Any
  dtype: Any
  implementation: Literal["xla", "cudnn"]
  dot_general_cls: Any = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    b, t, d = x.shape
    size = d // self.heads
    dense = functools.partial(
      nn.Dense,
      use_bias=False,
      kernel_init=_INIT,
      dtype=self.dtype,
      dot_general_cls=self.dot_general_cls,
    )
    q = dense(self.heads * size, name="q")(x).reshape(b, t, self.heads, size)
    k = dense(self.kv_heads * size, name="k")(x)
    v = dense(self.kv_heads * size, name="v")(x)
    k = k.reshape(b, t, self.kv_heads, size)
    v = v.reshape(b, t, self.kv_heads, size)
    if self.qk_norm:
      q = RMSNorm(dtype=self.dtype, name="q_norm")(q)
      k = RMSNorm(dtype=self.dtype, name="k_norm")(k)
    q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
    y = jax.nn.dot_product_attention(
      q, k, v, is_causal=True, implementation=self.implementation
    )
    out = dense(d, kernel_init=self.out_init, name="out")
    return out(y.reshape(b, t, d))


class FeedForward(nn.Module):
  """down(relu(up(x))²), or down(silu(gate(x)) · up(x))."""

  hidden: int
  activation: str
  out_init: Any
  dtype: Any
  dot_general_cls: Any = None

  @nn.compact
  def __call__(self, x: Array) -> Array:
    dense = functools.partial(
      nn.Dense,
      use_bias=False,
      kernel_init=_INIT,
      dtype=self.dtype,
      dot_general_cls=self.dot_general_cls,
    )
    h = dense(self.hidden, name="up")(x)
    if self.activation == "swiglu":
      h = _swiglu(dense(self.hidden, name="gate")(x), h)
    else:
      h = _squared_relu(h)
    return dense(x.shape[-1], kernel_init=self.out_init, name="down")(h)


@jax.checkpoint
def _squared_relu(x: Array) -> Array:
  return jnp.square(nn.relu(x))


@jax.checkpoint
def _swiglu(gate: Array, x: Array) -> Array:
  return nn.silu(gate) * x


def rotate(x: Array, base: float) -> Array:
  """Rotary position embedding.

  The pair (x_i, x_{i + size/2}) turns by the angle t · base^(-2i / size).

  Args:
    x: [b, t, heads, size] float, size % 2 == 0.
    base: the slowest rotation's wavelength over 2π.

  Returns:
    [b, t, heads, size], dtype of ``x``; computed in float32.

  References:
    Su et al., "RoFormer", arXiv 2104.09864.
  """
  t, size = x.shape[1], x.shape[3]
  frequency = base ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
  angle = jnp.arange(t, dtype=jnp.float32)[:, None, None] * frequency
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def _dot_general_f32(lhs, rhs, dimension_numbers, precision=None):
  return jax.lax.dot_general(
    lhs,
    rhs,
    dimension_numbers,
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def from_config(config: ConfigDict) -> Transformer:
  """The model that a configuration describes."""
  model = config.model
  return Transformer(
    vocab=config.data.vocab,
    layers=model.layers,
    d=model.d,
    heads=model.heads,
    kv_heads=model.kv_heads,
    ffn=model.ffn,
    activation=model.activation,
    qk_norm=model.qk_norm,
    rope_base=model.rope_base,
    scan=model.scan,
    remat=model.remat,
    dtype=jnp.dtype(model.dtype),
    attention=model.attention,
  )
