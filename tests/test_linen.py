"""Contract of ``fp4jax.quantize`` on Flax linen: modules work unchanged.

The reference is the same module with ``fp4jax.dot`` injected through flax's own
``dot_general`` attributes, or written out where flax has none. Under nearest
rounding ``quantize(module.apply)`` equals it bit for bit, outputs, gradients
and mutable collections alike, and differs from the plain module.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Gemm
from fp4jax import Operand
from fp4jax import Policy
from fp4jax import Recipe
from fp4jax import Rule
from fp4jax import policies
from fp4jax import recipes

RNE = recipes.fp8("fp8_e4m3")
ALL = policies.all_linear(RNE)
_X = Operand(format="fp8_e4m3")
_G = Operand(format="fp8_e4m3", rounding="sr")
SR = Recipe(
  name="sr",
  fprop=Gemm(lhs=_X, rhs=_X),
  dgrad=Gemm(lhs=_G, rhs=_X),
  wgrad=Gemm(lhs=_X, rhs=_G),
)
ALL_SR = policies.all_linear(SR)
D = 16


def by_hand(lhs, rhs, dims, precision=None, preferred_element_type=None, **_):
  return fp4jax.dot(
    lhs,
    rhs,
    dims,
    recipe=RNE,
    precision=precision,
    preferred_element_type=preferred_element_type,
  )


def normal(seed, *shape):
  return jnp.asarray(
    np.random.default_rng(seed).standard_normal(shape), "float32"
  )


def same(a, b):
  """Whether two trees are equal bit for bit, dtypes and structure too."""
  leaves_a, tree_a = jax.tree.flatten(a)
  leaves_b, tree_b = jax.tree.flatten(b)
  return tree_a == tree_b and all(
    u.dtype == v.dtype and np.array_equal(u, v)
    for u, v in zip(leaves_a, leaves_b, strict=True)
  )


def run(apply, variables, *args, **kwargs):
  """Jitted outputs, and gradients of the sum of their squares."""

  def loss(params, rest, args, keys):
    out = apply({**rest, "params": params}, *args, **kwargs, **keys)
    leaves = jax.tree.leaves(out[0] if isinstance(out, tuple) else out)
    return sum((y.astype(jnp.float32) ** 2).sum() for y in leaves), out

  keys = {k: kwargs.pop(k) for k in ("fp4_key", "rngs") if k in kwargs}
  rest = {k: v for k, v in variables.items() if k != "params"}
  step = jax.jit(jax.grad(loss, has_aux=True))
  return step(variables["params"], rest, args, keys)


def check(module, hand, *args, **kwargs):
  """Quantised equals by hand, differs from plain; a BF16 policy is plain."""
  # Weights far from symmetric, biases not zero.
  variables = jax.tree.map(
    lambda p: p + 0.1, module.init(jax.random.key(0), *args)
  )
  apply = kwargs.pop("apply", lambda module: module.apply)
  rest = {k: v for k, v in kwargs.items() if k != "by_hand"}
  got = run(fp4jax.quantize(apply(module), ALL), variables, *args, **rest)
  assert same(got, run(apply(hand), variables, *args, **rest))
  plain = run(apply(module), variables, *args, **rest)
  assert not same(got[0], plain[0]) and not same(got[1], plain[1])
  left = fp4jax.quantize(apply(module), policies.bf16())
  assert same(run(left, variables, *args, **rest), plain)


# Modules

X = normal(9, 2, 3, D)


def dense_general(**kwargs):
  return nn.DenseGeneral((2, 4), axis=(-2, -1), **kwargs)


@pytest.mark.parametrize(
  "make",
  [
    functools.partial(nn.Dense, 8),
    functools.partial(nn.Dense, 8, dtype="bfloat16"),
    dense_general,
    functools.partial(nn.DenseGeneral, (2, 4), batch_dims=(0,)),
  ],
  ids=["Dense", "Dense bf16", "DenseGeneral", "DenseGeneral batched"],
)
def test_dense(make):
  check(make(), make(dot_general=by_hand), X)


def test_einsum():
  class Hand(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = self.param("kernel", nn.initializers.normal(), (D, 2, 4))
      b = self.param("bias", nn.initializers.zeros, (2, 4))
      return jnp.einsum("btd,dnh->btnh", x, w, _dot_general=by_hand) + b

  check(nn.Einsum((D, 2, 4), "btd,dnh->btnh"), Hand(), X)


def test_multi_head_attention():
  """Four linear layers; scores and their product with the values are none."""
  make = functools.partial(
    nn.MultiHeadDotProductAttention, num_heads=2, qkv_features=8
  )
  hand = make(qkv_dot_general=by_hand, out_dot_general=by_hand)
  check(make(), hand, X)
  variables = make().init(jax.random.key(0), X)
  table = fp4jax.coverage(fp4jax.quantize(make().apply, ALL), variables, X)
  assert len(table.rows) == 6 and len(table.quantised) == 4


def test_embed_attend():
  """Lookup, a layer, and the same table again as the head."""

  class Model(nn.Module):
    dot: object = None

    @nn.compact
    def __call__(self, ids):
      embed = nn.Embed(10, D)
      x = nn.Dense(D, dot_general=self.dot)(embed(ids))
      if self.dot is None:
        return embed.attend(x)
      dims = (((1,), (0,)), ((), ()))
      return by_hand(x, embed.embedding.T, dims)

  check(Model(), Model(by_hand), jnp.array([3, 9, 0, 3]))


def test_conv_is_listed_and_left_alone():
  class Model(nn.Module):
    dot: object = None

    @nn.compact
    def __call__(self, x):
      x = nn.Conv(D, (3,))(x)
      self.sow("intermediates", "conv", x)
      return nn.Dense(8, dot_general=self.dot)(x)

  check(Model(), Model(by_hand), X)
  variables = {"params": Model().init(jax.random.key(0), X)["params"]}
  apply = functools.partial(Model().apply, mutable=["intermediates"])
  got = jax.jit(fp4jax.quantize(apply, ALL))(variables, X)
  plain = jax.jit(apply)(variables, X)
  assert same(got[1], plain[1]) and not same(got[0], plain[0])
  conv, _ = fp4jax.coverage(fp4jax.quantize(apply, ALL), variables, X).rows
  assert conv.path == "params/Conv_0/kernel" and not conv.quantised
  assert "convolutions" in conv.reason


class Norm(nn.Module):
  """Statistics and dropout between two layers."""

  dot: object = None
  train: bool = True

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(D, dot_general=self.dot)(x)
    x = nn.BatchNorm(use_running_average=not self.train)(x)
    x = nn.Dropout(0.5, deterministic=not self.train)(nn.relu(x))
    return nn.Dense(8, dot_general=self.dot)(x)


def test_mutable_collections_and_rngs():
  """BatchNorm's statistics come back, dropout draws the plain model's mask."""
  variables = Norm(train=False).init(jax.random.key(0), X)
  args = dict(mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})
  got = run(fp4jax.quantize(Norm().apply, ALL), variables, X, **args)
  hand = run(Norm(by_hand).apply, variables, X, **args)
  plain = run(Norm().apply, variables, X, **args)
  assert same(got, hand) and not same(got, plain)
  assert set(got[1][1]) == {"batch_stats"}
  old = variables["batch_stats"]["BatchNorm_0"]["mean"]
  assert not same(got[1][1]["batch_stats"]["BatchNorm_0"]["mean"], old)
  other = dict(args, rngs={"dropout": jax.random.key(2)})
  quantised = fp4jax.quantize(Norm().apply, ALL)
  assert not same(run(quantised, variables, X, **other), got)


def test_d15_nothing_is_added_and_nothing_needs_to_be_mutable():
  """The init tree is the plain module's; train, evaluate with mutable=False."""
  model = Norm(train=False)
  variables = model.init(jax.random.key(0), X)
  quantised = fp4jax.quantize(model.apply, ALL_SR)
  grads, out = run(quantised, variables, X, fp4_key=jax.random.key(0))
  assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
  evaluate = jax.jit(functools.partial(quantised, mutable=False))
  assert same(evaluate(variables, X), jax.jit(quantised)(variables, X))
  assert same(out, jax.jit(Norm(by_hand, train=False).apply)(variables, X))
  out, updates = jax.eval_shape(
    functools.partial(quantised, mutable=True), variables, X
  )
  assert jax.tree.structure(dict(updates)) == jax.tree.structure(variables)
  train = fp4jax.quantize(Norm().apply, ALL)
  _, updates = jax.eval_shape(
    functools.partial(train, mutable=True, rngs={"dropout": jax.random.key(0)}),
    variables,
    X,
  )
  assert jax.tree.structure(dict(updates)) == jax.tree.structure(variables)


# Lifted transformations


class Block(nn.Module):
  dot: object = None

  @nn.compact
  def __call__(self, x, _=None):
    y = nn.relu(nn.Dense(D, dot_general=self.dot)(x))
    return y, y[0, 0]


class Stack(nn.Module):
  """Three blocks: scanned, rematerialised or unrolled."""

  dots: tuple = (None, None, None)
  how: str = "scan"

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block) if "remat" in self.how else Block
    if "scan" in self.how:
      block = nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
      )
      return block(self.dots[0], name="layers")(x, None)
    for i, dot in enumerate(self.dots):
      x, _ = block(dot, name=f"layers_{i}")(x)
    return x


@pytest.mark.parametrize("how", ["scan", "remat", "remat scan"])
def test_scan_and_remat(how):
  check(Stack(how=how), Stack(3 * (by_hand,), how=how), X)


def test_scan_split_by_layers_equals_the_unrolled_model():
  policy = Policy(
    rules=(Rule(path="**/layers/**", layers=1, recipe=None),), default=RNE
  )
  scanned = Stack(how="scan")
  variables = scanned.init(jax.random.key(0), X)
  stacked = variables["params"]["layers"]
  grads, out = run(fp4jax.quantize(scanned.apply, policy), variables, X)
  hand = Stack((by_hand, None, by_hand), how="unrolled")
  layer = lambda i: jax.tree.map(lambda p: p[i], stacked)
  params = {f"layers_{i}": layer(i) for i in range(3)}
  hand_grads, hand_out = run(hand.apply, {"params": params}, X)
  assert same(out[0], hand_out)
  for i in range(3):
    for a, b in zip(
      jax.tree.leaves(grads["layers"]),
      jax.tree.leaves(hand_grads[f"layers_{i}"]),
      strict=True,
    ):  # A scan of one layer may be compiled to another order of sums.
      np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)
  assert not same(out, run(scanned.apply, variables, X)[1])


def test_vmap():
  """nn.vmap over two members: a batched weight, scales of each member."""

  def make(dot=None):
    return nn.vmap(
      nn.Dense,
      in_axes=0,
      variable_axes={"params": 0},
      split_rngs={"params": True},
    )(8, dot_general=dot)

  check(make(), make(by_hand), X * jnp.array([1, 50.0])[:, None, None])


# Randomness


class Twins(nn.Module):
  """The same product twice, as two modules or as two steps of a scan."""

  scan: bool

  @nn.compact
  def __call__(self, x):
    class Same(nn.Module):
      @nn.compact
      def __call__(self, carry, _):
        return carry, nn.Dense(8, use_bias=False)(x)

    if self.scan:
      layers = nn.scan(
        Same, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
      )
      return layers()(0.0, None)[1]
    return jnp.stack([Same()(0.0, None)[1], Same()(0.0, None)[1]])


@pytest.mark.parametrize("scan", [False, True])
def test_e01_d05_equal_layers_draw_different_bits(scan):
  """Equal weights, inputs and cotangents: only the rounding differs.

  Where the gradient's rounding differs, about a half of the elements of a
  layer's gradient do at least; they are sums over 6 tokens.
  """
  model = Twins(scan=scan)
  variables = model.init(jax.random.key(0), X)
  w = normal(0, D, 8)
  variables = jax.tree.map(lambda p: jnp.broadcast_to(w, p.shape), variables)
  quantised = fp4jax.quantize(model.apply, ALL_SR)
  grads, out = run(quantised, variables, X, fp4_key=jax.random.key(0))
  leaves = jax.tree.leaves(grads)
  first, second = leaves[0] if scan else leaves
  assert same(out[0], out[1])
  assert (first != second).mean() > 0.5
  assert same(run(quantised, variables, X, fp4_key=jax.random.key(0))[0], grads)


def test_missing_keys_name_the_module():
  model = Stack(how="unrolled")
  variables = model.init(jax.random.key(0), X)
  with pytest.raises(
    fp4jax.MissingKeyError, match="params/layers_0/Dense_0/kernel"
  ):
    run(fp4jax.quantize(model.apply, ALL_SR), variables, X)


def test_a_module_in_place_of_a_function():
  with pytest.raises(ValueError, match=r"linen module \(Stack\).*model.apply"):
    fp4jax.quantize(Stack(how="unrolled"), ALL)
  with pytest.raises(ValueError, match="method of a module.*model.apply"):
    bound = nn.Dense(8).bind({"params": {"kernel": jnp.ones((4, 8))}})
    fp4jax.quantize(bound.__call__, ALL)
  with pytest.raises(ValueError, match=r"class \(Dense\).*its apply"):
    fp4jax.quantize(nn.Dense, ALL)
