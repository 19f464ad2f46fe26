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

from experiments.models import layers

Array = jax.Array


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

  @property
  def auxiliary(self) -> bool:
    """Whether a call sows losses."""
    return False

  @nn.compact
  def __call__(self, tokens: Array) -> Array:
    """Args: tokens, [b, t] int. Returns: logits, [b, t, vocab] float32."""
    x = layers.embed(self.vocab, self.d, self.dtype)(tokens)
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
    x = layers.RMSNorm(dtype=self.dtype, name="norm")(x)
    return layers.lm_head(self.vocab, self.dtype)(x)


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
    out_init = layers.out_init(2 * self.layers)
    feed_forward = layers.FeedForward(
      hidden=self.ffn,
      activation=self.activation,
      out_init=out_init,
      dtype=self.dtype,
      dot_general_cls=self.dot_general_cls,
      name="ffn",
    )
    if self.attention is not None:
      attention = layers.Attention(
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
      x = x + attention(
        layers.RMSNorm(dtype=self.dtype, name="attention_norm")(x)
      )
    return x + feed_forward(
      layers.RMSNorm(dtype=self.dtype, name="ffn_norm")(x)
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
