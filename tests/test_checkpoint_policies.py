"""Contract of ``fp4jax.checkpoint_policies``: bytes kept, products run again.

Bytes are of what ``jax.vjp`` keeps beyond its arguments, by dtype, exact;
products are counted in the gradient's jaxpr. Gradients are those without
``jax.checkpoint``, bit for bit, where nothing but the products sums: XLA may
sum a norm's statistics in another order when it is computed again.
"""

import functools

from flax import linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import memory
from experiments.models import transformer
import fp4jax
from fp4jax import Policy
from fp4jax import Rule
from fp4jax import checkpoint_policies
from fp4jax import policies
from fp4jax import recipes

LAYERS, D, FFN, BATCH, T = 3, 64, 256, 2, 32
HEAD = Rule(path="**/lm_head/**", recipe=None)
NVFP4 = Policy(rules=(HEAD,), default=recipes.nvfp4())
KEY = jax.random.key(3)

# For nn.remat; no remat at all is None.
REMAT = {
  "nothing": {"policy": None},
  "packed": {"policy": checkpoint_policies.packed_saveable},
  "linears": {"policy": checkpoint_policies.linears_saveable},
}


def products(jaxpr) -> int:
  """Products in a jaxpr, at any depth."""
  return str(jaxpr).count("dot_general[")


def transformer_gradient(remat, scan=True, policy=NVFP4):
  """Bytes kept by dtype, and products, of a Transformer's gradient."""
  net = transformer.Transformer(
    vocab=64,
    layers=LAYERS,
    d=D,
    heads=2,
    kv_heads=2,
    ffn=FFN,
    scan=scan,
    remat=remat is not None,
    remat_policy=remat and remat["policy"],
  )
  tokens = jax.ShapeDtypeStruct((BATCH, T), jnp.int32)
  variables = jax.eval_shape(net.init, KEY, tokens)
  f = fp4jax.quantize(net.apply, policy)
  loss = lambda variables, tokens: f(variables, tokens, fp4_key=KEY).sum()
  jaxpr = jax.make_jaxpr(jax.grad(loss))(variables, tokens)
  return memory.residual_bytes(loss, variables, tokens), products(jaxpr)


@pytest.mark.parametrize(
  "scan", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_bytes_and_products_of_a_transformer(scan):
  """Of 8 products a layer and head: 6 linear, 2 of attention.

  Nothing or packed residuals saved, all but the last linear runs again. With
  the outputs saved one of attention's does, the other's is packed.
  """
  gradient = functools.partial(transformer_gradient, scan=scan)
  (none, once), (full, again) = gradient(None), gradient(REMAT["nothing"])
  packed, packed_again = gradient(REMAT["packed"])
  linears, linears_again = gradient(REMAT["linears"])

  bodies = 1 if scan else LAYERS
  assert once == 3 * (8 * bodies + 1)
  assert again == packed_again == once + 7 * bodies
  assert linears_again == once + bodies

  # The scale of 16, or 16 by 16, elements has a byte, that of an operand four.
  tokens, inputs = BATCH * T, 3 * D + FFN
  weights = 4 * D * D + 2 * D * FFN
  codes = tokens * inputs * 9 / 16 + weights * (1 / 2 + 1 / 256)
  operands = 4 + 6
  added = {k: v - full.get(k, 0) for k, v in packed.items()}
  assert added.pop("uint8") + added.get("float32", 0) == LAYERS * (
    codes + 4 * operands
  )
  assert not any(v for k, v in added.items() if k != "float32")
  assert linears.pop("bfloat16") - packed.pop("bfloat16") == (
    LAYERS * tokens * (4 * D + FFN) * 2
  )
  assert linears == packed
  assert packed["uint8"] == none["uint8"]
  sizes = [sum(kept.values()) for kept in (full, packed, none)]
  assert sizes == sorted(sizes) and sum(linears.values()) < sizes[-1] / 2


def test_layers_left_as_written_keep_their_outputs():
  """Under a policy that splits the scan, first and last layers are BF16."""
  policy = policies.nemotron(first=1, last=1)
  kept, again = transformer_gradient(REMAT["linears"], policy=policy)
  _, once = transformer_gradient(None, policy=policy)
  # In BF16 both of attention's products run again, for the gradient of `out`.
  assert again == once + 1 + 2 * 2
  outputs = LAYERS * BATCH * T * (4 * D + FFN) * 2
  _, plain = transformer_gradient(REMAT["nothing"], policy=policy)
  assert plain == once + 3 * 7
  assert kept["bfloat16"] > outputs


class Block(nn.Module):
  """A residual feed-forward: nothing but its products sums."""

  @nn.compact
  def __call__(self, x):
    h = nn.Dense(48, use_bias=False, name="up")(x)
    h = jnp.square(nn.relu(checkpoint_name(h, "hidden")))
    return x + nn.Dense(32, use_bias=False, name="down")(h)


class Stack(nn.Module):
  """Four blocks, unrolled, scanned or by ``nn.remat_scan``."""

  how: str
  remat: dict | None = None

  @nn.compact
  def __call__(self, x):
    if self.how == "remat_scan":
      everything = {"policy": jax.checkpoint_policies.everything_saveable}
      options = self.remat or everything
      return nn.remat_scan(Block, lengths=(2, 2), **options)(name="layers")(x)
    block = Block if self.remat is None else nn.remat(Block, **self.remat)
    if self.how == "scan":
      stack = nn.scan(
        lambda block, x, _: (block(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=4,
      )
      return stack(block(name="layers"), x, None)[0]
    for i in range(4):
      x = block(name=f"layers_{i}")(x)
    return x


X = jax.random.normal(jax.random.key(0), (24, 32))


def stack_gradient(how, remat, around=False):
  """The gradient of a stack, as a function of its variables; and these."""
  net = Stack(how, None if around else remat)
  variables = net.init(jax.random.key(1), X)
  f = fp4jax.quantize(net.apply, policies.all_linear())
  f = jax.checkpoint(f, **remat) if around else f
  loss = lambda variables: jnp.square(f(variables, X, fp4_key=KEY)).sum()
  return jax.grad(loss), variables


@pytest.mark.parametrize(
  "how", ["scan", pytest.param("remat_scan", marks=pytest.mark.slow)]
)
def test_gradients_are_those_without_remat(how):
  """Rounded stochastically, and bit for bit the same."""
  gradient, variables = stack_gradient(how, None)
  expected = jax.jit(gradient)(variables)
  assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(expected))
  for name in ("packed", "linears"):
    gradient, _ = stack_gradient(how, REMAT[name])
    jax.tree.map(
      np.testing.assert_array_equal, jax.jit(gradient)(variables), expected
    )


@pytest.mark.parametrize("around", [True, False])
def test_around_or_inside_of_quantize(around):
  """Products that run again in four blocks of two."""
  again = {}
  gradient, variables = stack_gradient("unrolled", None)
  once = products(jax.make_jaxpr(gradient)(variables))
  for name, remat in REMAT.items():
    gradient, _ = stack_gradient("unrolled", remat, around)
    again[name] = products(jax.make_jaxpr(gradient)(variables)) - once
  # Around, the last layer's output is needed for the loss, and is at hand.
  most = 7 if around else 4
  assert again == {"nothing": most, "packed": most, "linears": 0}


def test_policies_combine_with_names():
  """Packed residuals and the user's "hidden", [4, 24, 48] float32.

  From which all is computed again, so that x, [4, 24, 32], need not be kept.
  """
  both = jax.checkpoint_policies.save_from_both_policies(
    checkpoint_policies.packed_saveable,
    jax.checkpoint_policies.save_only_these_names("hidden"),
  )
  kept = []
  for remat in (REMAT["packed"], {"policy": both}):
    net = Stack("scan", remat)
    variables = jax.eval_shape(net.init, KEY, X)
    f = fp4jax.quantize(net.apply, policies.all_linear())
    loss = lambda v, f=f: jnp.square(f(v, X, fp4_key=KEY)).sum()
    kept.append(memory.residual_bytes(loss, variables))
  packed, combined = kept
  assert combined["float32"] - packed["float32"] == 4 * 24 * (48 - 32) * 4
  assert combined["uint8"] == packed["uint8"]


def test_experts_keep_their_outputs():
  """A ragged product is not run again, and its rounding is that of before."""

  def experts(w, x):
    sizes = jnp.array([10, 14], jnp.int32)
    x = jnp.square(jax.lax.ragged_dot(x, w["up"], sizes))
    return jax.lax.ragged_dot(x, w["down"], sizes)

  w = {
    "up": jax.random.normal(jax.random.key(1), (2, 32, 48)),
    "down": jax.random.normal(jax.random.key(2), (2, 48, 32)),
  }
  counts, gradients = {}, {}
  for name, remat in {"none": None, **REMAT}.items():
    f = jax.checkpoint(experts, **remat) if remat else experts
    f = fp4jax.quantize(f, policies.all_linear(recipes.mxfp8()))
    gradient = jax.grad(lambda w, f=f: jnp.square(f(w, X)).sum())
    counts[name] = str(jax.make_jaxpr(gradient)(w)).count("ragged_dot_general[")
    gradients[name] = gradient
  assert counts["linears"] == counts["none"] < counts["packed"]
  jax.tree.map(
    np.testing.assert_array_equal,
    *(jax.jit(gradients[name])(w) for name in ("linears", "none")),
  )
