"""A decoder-only hybrid of Mamba-2, attention, feed-forwards and experts.

One mixer a block, x + mixer(norm(x)), in the order that a pattern gives:

  M  Mamba-2
  *  causal grouped-query attention
  -  squared ReLU feed-forward
  E  mixture of experts, each a squared ReLU feed-forward

RMSNorm, no positional embedding (Mamba tells positions apart), no biases but
the convolution's, untied head. Dtypes as in ``layers``.

References:
  NVIDIA, "Nemotron-H", arXiv 2504.03624.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import Literal

from flax import linen as nn
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.models import experts
from experiments.models import layers
from experiments.models import mamba

Array = jax.Array

MIXERS = {"M": "mamba", "*": "attention", "-": "ffn", "E": "moe"}
"""Letters of a pattern, and what the mixer's parameters are under."""


class Hybrid(nn.Module):
  """Next-token logits of a sequence of tokens.

  Attributes:
    vocab: number of tokens.
    pattern: letters of ``MIXERS``, one a block.
    repeat: how often the pattern is repeated.
    d: width.
    heads: query heads of attention, a divisor of the width.
    kv_heads: key and value heads, a divisor of ``heads``.
    ffn: hidden width of the feed-forwards.
    mamba_head: size of Mamba's heads.
    mamba_state: size of its state.
    mamba_groups: of its heads.
    mamba_conv: inputs that its convolution sees.
    mamba_chunk: length of its scan's chunks.
    mamba_expand: its inner width over the width.
    experts: of a mixture.
    experts_per_token: how many of them a token goes to.
    expert_ffn: hidden width of each.
    balance: coefficient of the balance loss.
    scan: one scanned stack ``blocks`` of pattern after pattern, its blocks
      named ``position_0``, ..., rather than ``blocks_0``, ... for each.
    remat: recomputes each block in the backward pass.
    dtype: of the arithmetic.
    attention: ``jax.nn.dot_product_attention``'s implementation.
  """

  vocab: int
  pattern: str
  repeat: int
  d: int
  heads: int
  kv_heads: int
  ffn: int
  mamba_head: int
  mamba_state: int
  mamba_groups: int
  mamba_conv: int
  mamba_chunk: int
  mamba_expand: int
  experts: int
  experts_per_token: int
  expert_ffn: int
  balance: float
  scan: bool = False
  remat: bool = False
  dtype: Any = jnp.bfloat16
  attention: Literal["xla", "cudnn"] = "xla"

  @property
  def auxiliary(self) -> bool:
    """Whether a call sows losses."""
    return "E" in self.pattern

  @nn.compact
  def __call__(self, tokens: Array) -> Array:
    """Args: tokens, [b, t] int. Returns: logits, [b, t, vocab] float32."""
    x = layers.embed(self.vocab, self.d, self.dtype)(tokens)
    block: Any = Block
    if self.remat:
      block = nn.remat(Block, prevent_cse=not self.scan)
    mixers = self._mixers()
    unit = [
      functools.partial(block, mixer=mixers[letter], dtype=self.dtype)
      for letter in self.pattern
    ]
    if self.scan:
      stack = nn.scan(
        lambda unit, x, _: (unit(x), None),
        variable_axes={"params": 0, "losses": 0},
        split_rngs={"params": True},
        length=self.repeat,
      )
      x, _ = stack(Unit(blocks=unit, name="blocks"), x, None)
    else:
      for i, make in enumerate(unit * self.repeat):
        x = make(name=f"blocks_{i}")(x)
    x = layers.RMSNorm(dtype=self.dtype, name="norm")(x)
    return layers.lm_head(self.vocab, self.dtype)(x)

  def _mixers(self) -> dict[str, Callable[[], nn.Module]]:
    """What makes the mixer of each letter."""
    out_init = layers.out_init(len(self.pattern) * self.repeat)
    common = {"out_init": out_init, "dtype": self.dtype}
    make: dict[str, Callable[..., nn.Module]] = {
      "M": functools.partial(
        mamba.Mamba,
        head=self.mamba_head,
        state=self.mamba_state,
        groups=self.mamba_groups,
        conv=self.mamba_conv,
        chunk=self.mamba_chunk,
        expand=self.mamba_expand,
      ),
      "*": functools.partial(
        layers.Attention,
        heads=self.heads,
        kv_heads=self.kv_heads,
        qk_norm=False,
        rope_base=None,
        implementation=self.attention,
      ),
      "-": functools.partial(
        layers.FeedForward, hidden=self.ffn, activation="relu2"
      ),
      "E": functools.partial(
        experts.Experts,
        experts=self.experts,
        per_token=self.experts_per_token,
        hidden=self.expert_ffn,
        balance=self.balance,
      ),
    }
    return {
      letter: functools.partial(make[letter], name=name, **common)
      for letter, name in MIXERS.items()
    }


class Block(nn.Module):
  """x + mixer(norm(x))."""

  mixer: Callable[[], nn.Module]
  dtype: Any

  @nn.compact
  def __call__(self, x: Array) -> Array:
    normed = layers.RMSNorm(dtype=self.dtype, name="norm")(x)
    return x + self.mixer()(normed)


class Unit(nn.Module):
  """The blocks of one pattern, as the scanned stack repeats them."""

  blocks: Sequence[Callable[..., nn.Module]]

  @nn.compact
  def __call__(self, x: Array) -> Array:
    # Bare numbers would be taken for the layers' indices by policies.
    for i, block in enumerate(self.blocks):
      x = block(name=f"position_{i}")(x)
    return x


def from_config(config: ConfigDict) -> Hybrid:
  """The model that a configuration describes."""
  model = config.model
  return Hybrid(
    vocab=config.data.vocab,
    pattern=model.pattern,
    repeat=model.repeat,
    d=model.d,
    heads=model.heads,
    kv_heads=model.kv_heads,
    ffn=model.ffn,
    mamba_head=model.mamba_head,
    mamba_state=model.mamba_state,
    mamba_groups=model.mamba_groups,
    mamba_conv=model.mamba_conv,
    mamba_chunk=model.mamba_chunk,
    mamba_expand=model.mamba_expand,
    experts=model.experts,
    experts_per_token=model.experts_per_token,
    expert_ffn=model.expert_ffn,
    balance=model.balance,
    scan=model.scan,
    remat=model.remat,
    dtype=jnp.dtype(model.dtype),
    attention=model.attention,
  )
