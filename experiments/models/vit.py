"""A Vision Transformer, in Flax NNX.

Patches are embedded linearly and told apart by learned positions; pre-norm
blocks of attention among all patches and of a GELU feed-forward; the mean over
the patches is classified. LayerNorm, biases everywhere. Dtypes as in
``layers``.

References:
  Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv 2010.11929; the
  mean instead of a class token: Zhai et al., arXiv 2106.04560.
"""

import functools
from typing import Any
from typing import Literal

from flax import nnx
import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.models import functional
from experiments.models import layers

Array = jax.Array

CHANNELS = 3


class Vit(nnx.Module):
  """Logits of the classes of images."""

  def __init__(
    self,
    *,
    image: int,
    patch: int,
    classes: int,
    layers: int,
    d: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    scan: bool = False,
    remat: bool = False,
    dtype: Any = jnp.bfloat16,
    attention: Literal["xla", "cudnn"] = "xla",
    rngs: nnx.Rngs,
  ):
    """Makes the parameters.

    Args:
      image: side of the square images in pixels.
      patch: side of a patch, a divisor of ``image``.
      classes: number of classes.
      layers: number of blocks.
      d: width.
      heads: query heads.
      kv_heads: key and value heads, a divisor of ``heads``.
      ffn: hidden width of the feed-forward.
      scan: one scanned stack ``blocks``, rather than ``blocks_0``, ...
      remat: recomputes each block in the backward pass.
      dtype: of the arithmetic.
      attention: ``jax.nn.dot_product_attention``'s implementation.
      rngs: the stream "params" is drawn from.
    """
    self.patch, self.layers, self.dtype = patch, layers, dtype
    self.scan, self.remat = scan, remat
    inputs = CHANNELS * patch**2
    self.patch_embed = nnx.Linear(inputs, d, dtype=dtype, rngs=rngs)
    positions = _INIT(rngs.params(), ((image // patch) ** 2, d))
    self.positions = nnx.Param(positions)
    block = functools.partial(
      Block,
      layers=layers,
      d=d,
      heads=heads,
      kv_heads=kv_heads,
      ffn=ffn,
      dtype=dtype,
      attention=attention,
    )
    if scan:
      keys = jax.random.split(rngs.params(), layers)
      self.blocks = nnx.vmap(lambda key: block(rngs=nnx.Rngs(key)))(keys)
    else:
      for i in range(layers):
        setattr(self, f"blocks_{i}", block(rngs=rngs))
    self.norm = nnx.LayerNorm(d, dtype=dtype, rngs=rngs)
    self.head = nnx.Linear(
      d,
      classes,
      kernel_init=_INIT,
      dtype=dtype,
      preferred_element_type=jnp.float32,
      rngs=rngs,
    )

  def __call__(self, images: Array) -> Array:
    """Args: images, [b, s, s, 3] uint8. Returns: [b, classes] float32."""
    pixels = images.astype(jnp.float32) / 127.5 - 1
    x = self.patch_embed(patches(pixels, self.patch).astype(self.dtype))
    x = x + self.positions[...].astype(self.dtype)
    run = lambda block, x: block(x)
    if self.remat:
      run = nnx.remat(run, prevent_cse=not self.scan)
    if self.scan:
      x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
        self.blocks, x
      )
    else:
      for i in range(self.layers):
        x = run(getattr(self, f"blocks_{i}"), x)
    return self.head(_normed(self.norm, x).mean(axis=1))


class Block(nnx.Module):
  """x + attention(norm(x)), then x + ffn(norm(x))."""

  def __init__(
    self, *, layers, d, heads, kv_heads, ffn, dtype, attention, rngs
  ):
    norm = functools.partial(nnx.LayerNorm, d, dtype=dtype, rngs=rngs)
    out_init = _out_init(2 * layers)
    self.attention_norm = norm()
    self.attention = Attention(
      d=d,
      heads=heads,
      kv_heads=kv_heads,
      out_init=out_init,
      dtype=dtype,
      implementation=attention,
      rngs=rngs,
    )
    self.ffn_norm = norm()
    self.ffn = FeedForward(
      d=d, hidden=ffn, out_init=out_init, dtype=dtype, rngs=rngs
    )

  def __call__(self, x: Array) -> Array:
    x = x + self.attention(_normed(self.attention_norm, x))
    return x + self.ffn(_normed(self.ffn_norm, x))


class Attention(nnx.Module):
  """Grouped-query attention of every patch to all."""

  def __init__(
    self, *, d, heads, kv_heads, out_init, dtype, implementation, rngs
  ):
    self.heads, self.kv_heads = heads, kv_heads
    self.implementation = implementation
    size = d // heads
    linear = functools.partial(
      nnx.Linear, kernel_init=_INIT, dtype=dtype, rngs=rngs
    )
    self.q = linear(d, heads * size)
    self.k = linear(d, kv_heads * size)
    self.v = linear(d, kv_heads * size)
    self.out = linear(heads * size, d, kernel_init=out_init)

  def __call__(self, x: Array) -> Array:
    b, t, _ = x.shape
    y = jax.nn.dot_product_attention(
      self.q(x).reshape(b, t, self.heads, -1),
      self.k(x).reshape(b, t, self.kv_heads, -1),
      self.v(x).reshape(b, t, self.kv_heads, -1),
      implementation=self.implementation,
    )
    return self.out(y.reshape(b, t, -1))


class FeedForward(nnx.Module):
  """down(gelu(up(x)))."""

  def __init__(self, *, d, hidden, out_init, dtype, rngs):
    linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
    self.up = linear(d, hidden, kernel_init=_INIT)
    self.down = linear(hidden, d, kernel_init=out_init)

  def __call__(self, x: Array) -> Array:
    return self.down(_gelu(self.up(x)))


def patches(images: Array, size: int) -> Array:
  """Cuts images into square patches, row by row.

  Args:
    images: [b, s, s, c], s % size == 0.
    size: side of a patch.

  Returns:
    [b, (s / size)², size² · c]; a patch's pixels are row by row too.

  >>> patches(jnp.arange(16).reshape(1, 4, 4, 1), 2)[0].tolist()[:2]
  [[0, 1, 4, 5], [2, 3, 6, 7]]
  """
  b, s, _, c = images.shape
  n = s // size
  x = images.reshape(b, n, size, n, size, c).swapaxes(2, 3)
  return x.reshape(b, n * n, size * size * c)


_INIT = layers.INIT
_out_init = layers.out_init  # where ``layers`` is a number

# As in ``layers``: the backward pass keeps inputs in ``dtype``, no float32.
_normed = nnx.remat(lambda norm, x: norm(x))
_gelu = jax.checkpoint(nnx.gelu)


def from_config(config: ConfigDict) -> functional.Functional:
  """The model that a configuration describes."""
  model = config.model
  make = functools.partial(
    Vit,
    image=config.data.image,
    patch=model.patch,
    classes=config.data.classes,
    layers=model.layers,
    d=model.d,
    heads=model.heads,
    kv_heads=model.kv_heads,
    ffn=model.ffn,
    scan=model.scan,
    remat=model.remat,
    dtype=jnp.dtype(model.dtype),
    attention=model.attention,
  )
  return functional.Functional(make=lambda rngs: make(rngs=rngs))
