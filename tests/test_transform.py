"""Contract of ``fp4jax.quantize`` on plain functions.

Each model is written once, over a product ``mm(x, w)``: with ``x @ w`` it is
the plain model, with ``fp4jax.dot`` of the same recipe it is the model
quantised by hand. Under nearest rounding

  quantize(plain, policy)  is  by hand        bit for bit, gradients too,
  quantize(plain, policy)  is not  plain      (the coverage table cannot lie),
  quantize(plain, bf16)    is  plain          one jaxpr apart from names.

Stochastic recipes are compared with the streams of docs/numerics.md: site
number, loop iteration. Where two sides run GEMMs of other shapes (vmap against
a loop, four devices against one) sums may be accumulated in another order: 1e-5
of the largest magnitude, a thousandth of the quantisation error that is looked
for.
"""

import functools
import os
import re
import subprocess
import sys
import textwrap

from flax import nnx
import jax
from jax import lax
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
from fp4jax import rounding

# FP8 per tensor compiles fastest, and is as visible as NVFP4.
RNE = recipes.fp8("fp8_e4m3")
_X = Operand(format="fp8_e4m3")
_G = Operand(format="fp8_e4m3", rounding="sr")
SR = Recipe(
  name="sr",
  fprop=Gemm(lhs=_X, rhs=_X),
  dgrad=Gemm(lhs=_G, rhs=_X),
  wgrad=Gemm(lhs=_X, rhs=_G),
)
ALL = policies.all_linear(RNE)
ALL_SR = policies.all_linear(SR)
D = 16


def plain(x, w):
  return x @ w


def by_hand(x, w, recipe=RNE, **kwargs):
  dims = (((x.ndim - 1,), (0,)), ((), ()))
  return fp4jax.dot(x, w, dims, recipe=recipe, **kwargs)


def streams(key, site, loop=0):
  """The streams of a site's six operands in one iteration of its loops."""
  words = [rounding.site_stream(key, site, i)[:2] for i in range(6)]
  return rounding.Streams(
    jnp.stack(words)[None], jnp.uint32(0), jnp.uint32(loop)
  )


def normal(seed, *shape, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, dtype)


def same(a, b):
  """Whether two trees are equal bit for bit, dtypes and structure too."""
  leaves_a, tree_a = jax.tree.flatten(a)
  leaves_b, tree_b = jax.tree.flatten(b)
  return tree_a == tree_b and all(
    u.dtype == v.dtype and np.array_equal(u, v, equal_nan=True)
    for u, v in zip(leaves_a, leaves_b, strict=True)
  )


def assert_close(a, b):
  for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    u, v = np.asarray(u, np.float64), np.asarray(v, np.float64)
    assert u.shape == v.shape
    assert (np.abs(u - v) <= 1e-5 * np.abs(v).max()).all()


def outputs_and_gradients(f, params, *args, **kwargs):
  """Outputs, and gradients of the sum of their squares for params."""

  def loss(params):
    out = f(params, *args, **kwargs)
    leaves = jax.tree.leaves(out)
    return sum((y.astype(jnp.float32) ** 2).sum() for y in leaves), out

  grads, out = jax.grad(loss, has_aux=True)(params)
  return out, grads


# Jitted outputs and gradients, compiled once for each function.
run = jax.jit(outputs_and_gradients, static_argnums=0)


# Models over mm(x, w)

MODELS = {}
X = normal(9, 8, D)


def model(*shapes, args=(X,), names="abcdefgh"):
  """Registers a model with normal parameters of these shapes."""

  def register(f):
    params = {
      name: normal(i, *shape)
      for i, (name, shape) in enumerate(zip(names, shapes, strict=False))
    }
    MODELS[f.__name__] = (f, params, args)
    return f

  return register


@model((D, D), (D,), (D, 8))
def dense(mm, p, x):
  return mm(jax.nn.silu(mm(x, p["a"]) + p["b"]), p["c"])


@model((D, 8), args=(normal(9, 2, 3, D),))
def leading_axes(mm, p, x):
  return mm(x, p["a"])


@model((D, D), (D, 8))
def three_operands(mm, p, x):
  if mm is plain:
    return jnp.einsum("bi,ij,jk->bk", x, p["a"], p["b"])
  return mm(mm(x, p["a"]), p["b"])


@model((D, D), (D, 4), (4, D))
def lora_branch(mm, p, x):
  return mm(x, p["a"]) + 2 * mm(mm(x, p["b"]), p["c"])


@model((D, D), (D, 4), (4, D))
def lora_merged(mm, p, x):
  return mm(x, p["a"] + p["b"] @ p["c"])


@model((D, 8), (8,))
def weight_norm(mm, p, x):
  norm = jnp.sqrt((p["a"] ** 2).sum(0))
  return mm(x, p["a"] * (p["b"] / norm))


@model((D, 8), (D, 4), (D, 4))
def fused_by_concatenation(mm, p, x):
  return mm(x, jnp.concatenate([p["a"], p["b"], p["c"]], axis=1))


@model((10, D), (D, D), args=(jnp.array([1, 9, 1, 4]),))
def tied_embedding(mm, p, ids):
  return mm(mm(p["a"][ids], p["b"]), p["a"].T)


@model((10, D), (D, D), args=(jnp.array([3, 0, 7]),))
def token_by_token(mm, p, ids):
  """A recurrent cell: each step looks up one row, by a scalar index."""

  def step(h, i):
    h = jnp.tanh(mm(p["a"][i][None] + h, p["b"]))
    return h, h

  return lax.scan(step, jnp.zeros((1, D)), ids)[1]


@model((D, 3 * D), (D, D))
def attention(mm, p, x):
  q, k, v = jnp.split(mm(x, p["a"]), 3, axis=-1)
  return mm(jax.nn.softmax(q @ k.T) @ v, p["b"])


@model((3, D, D))
def slices_of_a_stack(mm, p, x):
  for i in range(3):
    x = jax.nn.relu(mm(x, p["a"][i]))
  return mm(x, p["a"][1, :, 2:10])


@model((D, 8), (D, 8), args=(X, jnp.float32(0.7)))
def scaled_by_a_scalar(mm, p, x, keep):
  """DropConnect's 1 / keep and the like: a scalar leaves a weight one."""
  return mm(x, p["a"] / keep) + mm(x, p["b"] * jnp.exp(x[0, 0]))


@model((D, 8), (D,))
def closure(mm, p, x):
  return mm(x * p["b"], p["a"]) + (x @ CONSTANT)


CONSTANT = normal(5, D, 8)


@model((D, D), (D, 8), args=(normal(9, 8, D, dtype="bfloat16"),))
def mixed_precision(mm, p, x):
  x = mm(x, p["a"].astype(x.dtype))
  if mm is plain:
    dims = (((1,), (0,)), ((), ()))
    w = p["b"].astype(x.dtype)
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)
  return mm(x, p["b"].astype(x.dtype), preferred_element_type=jnp.float32)


@model((D, D), (D, D), args=(normal(9, 8, D, dtype="bfloat16"),))
def mixed_operands(mm, p, x):
  """A BF16 activation meets an FP32 weight."""
  return mm(jax.nn.gelu(mm(x, p["a"])), p["b"])


@model((4, D, D))
def scan_of_stacked_weights(mm, p, x):
  def block(x, w):
    y = jnp.tanh(mm(x, w))
    return y, y[0]

  return lax.scan(block, x, p["a"])


@model((4, D, D))
def scan_reversed_and_unrolled(mm, p, x):
  block = lambda x, w: (jnp.tanh(mm(x, w)), x.sum())
  return lax.scan(block, x, p["a"], reverse=True, unroll=2)


@model((2, 3, D, D), (2, D, D))
def nested_scans(mm, p, x):
  inner = lambda x, w: (jnp.tanh(mm(x, w)), None)

  def outer(x, ws):
    x, _ = lax.scan(inner, x, ws[0])
    return mm(x, ws[1]), None

  return lax.scan(outer, x, (p["a"], p["b"]))[0]


@model((D, D), (D, D), args=(normal(9, 3, 4, D),))
def scan_of_closure_and_carry(mm, p, xs):
  """A weight from the closure, one that the carry takes along."""

  def step(carry, x):
    h, w = carry
    h = jnp.tanh(mm(x, p["a"]) + mm(h, w))
    return (h, w * 0.5), h

  return lax.scan(step, (jnp.zeros((4, D)), p["b"]), xs)[1]


@model((3, D, D))
def loop_with_an_index(mm, p, x):
  body = lambda i, x: jnp.tanh(
    mm(x, lax.dynamic_index_in_dim(p["a"], i, keepdims=False))
  )
  return lax.fori_loop(0, 3, body, x)


@model((D, D), (D, D), args=(X, jnp.int32(1)))
def conditional(mm, p, x, which):
  first = lambda x: mm(x, p["a"])
  second = lambda x: jnp.tanh(mm(x, p["b"]))
  x = lax.cond(x.sum() > -1e9, first, second, x)
  return lax.switch(which, [first, second, lambda x: x], x)


@model((D, D), (D, 8))
def nested_jits(mm, p, x):
  inner = jax.jit(lambda w, x: mm(x, w))
  outer = jax.jit(lambda p, x: inner(p["b"], jax.nn.relu(inner(p["a"], x))))
  return outer(p, x)


@model((D, D), (D, 8))
def rematerialised(mm, p, x):
  policy = jax.checkpoint_policies.dots_saveable
  first = jax.checkpoint(lambda w, x: jnp.tanh(mm(x, w)), policy=policy)
  second = jax.checkpoint(lambda w, x: jnp.tanh(mm(x, w)), prevent_cse=False)
  return second(p["b"], first(p["a"], x))


@model((3, D, D))
def rematerialised_scan(mm, p, x):
  block = jax.checkpoint(lambda x, w: (jnp.tanh(mm(x, w)), None))
  return lax.scan(block, x, p["a"])[0]


@model((D, D), (D, 8))
def associative_operations(mm, p, x):
  """A linear recurrence h = a h + b along the rows, between two layers."""
  combine = lambda f, g: (f[0] * g[0], f[1] * g[0] + g[1])
  b = mm(x, p["a"])
  _, h = lax.associative_scan(combine, (jax.nn.sigmoid(x), b))
  return mm(jnp.cumsum(h, 0), p["b"])


@jax.custom_jvp
def _square(x):
  return x * x


_square.defjvp(lambda primals, tangents: (primals[0] ** 2, 3.0 * tangents[0]))


@model((D, D), (D, 8))
def custom_derivative_rules(mm, p, x):
  """A user's custom_jvp between layers keeps its (wrong) derivative, 3."""
  return mm(_square(mm(x, p["a"])), p["b"])


@jax.custom_vjp
def _opaque(w, x):
  return x @ w


_opaque.defvjp(
  lambda w, x: (x @ w, (w, x)),
  lambda kept, g: (kept[1].T @ g * 2, g @ kept[0].T),
)


@model((D, D), (D, 8))
def custom_vjp_with_a_product(mm, p, x):
  return mm(_opaque(p["a"], x), p["b"])


@model((D, 8), (8, D), (D, D))
def product_of_weights(mm, p, x):
  return (p["a"] @ p["b"]).sum() + mm(x, p["c"])


@model((D, 8), (D, D), args=(X, normal(8, D, 8) > 0))
def masked_weight(mm, p, x, mask):
  """A mask of data makes a weight no weight: left alone, and listed."""
  return mm(x, p["b"])[:, :8] + x @ (p["a"] * mask)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model_quantised_by_hand(name):
  f, params, args = MODELS[name]
  as_written = functools.partial(f, plain)
  got = run(fp4jax.quantize(as_written, ALL), params, *args)
  assert same(got, run(functools.partial(f, by_hand), params, *args))
  (out, grads), (plain_out, plain_grads) = got, run(as_written, params, *args)
  assert not same(out, plain_out)
  assert jax.tree.structure(out) == jax.tree.structure(plain_out)
  assert jax.tree.structure(grads) == jax.tree.structure(plain_grads)


def anonymous(jaxpr):
  """A jaxpr's text without the names of inner functions."""
  return re.sub(r"name=\S+|jaxpr=\{|0x[0-9a-f]+", "", str(jaxpr))


@pytest.mark.parametrize("name", MODELS)
def test_d07_a_bf16_policy_leaves_the_jaxpr(name):
  """Forward and gradient: one program apart from names, so the same bits."""
  f, params, args = MODELS[name]
  as_written = functools.partial(f, plain)
  left = fp4jax.quantize(as_written, policies.bf16())
  for transformed in (
    lambda f: f,
    lambda f: functools.partial(outputs_and_gradients, f),
  ):
    a = jax.make_jaxpr(transformed(left))(params, *args)
    b = jax.make_jaxpr(transformed(as_written))(params, *args)
    assert anonymous(a) == anonymous(b)


@pytest.mark.parametrize(
  "name", ["dense", "mixed_precision", "scan_of_stacked_weights"]
)
def test_d07_a_bf16_policy_leaves_every_bit(name):
  """Eager and jitted, outputs, gradients, dtypes."""
  f, params, args = MODELS[name]
  as_written = functools.partial(f, plain)
  left = fp4jax.quantize(as_written, policies.bf16())
  assert same(left(params, *args), as_written(params, *args))
  assert same(
    outputs_and_gradients(left, params, *args),
    outputs_and_gradients(as_written, params, *args),
  )
  assert same(run(left, params, *args), run(as_written, params, *args))


def test_d07_sites_left_alone_keep_their_bits_beside_quantised_ones():
  def two(p, x):
    return x @ p["a"], x @ p["b"]

  params = {"a": normal(0, D, 8), "b": normal(1, D, 8)}
  policy = Policy(rules=(Rule(path="a", recipe=None),), default=RNE)
  quantised = fp4jax.quantize(two, policy)
  for how in (run, outputs_and_gradients):
    (a, b), grads = how(quantised, params, X)
    (plain_a, plain_b), plain_grads = how(two, params, X)
    assert same((a, grads["a"]), (plain_a, plain_grads["a"]))
    assert not same(b, plain_b) and not same(grads["b"], plain_grads["b"])


def test_eager_and_jitted_give_the_same_bits():
  # One product: a compiler may fuse what stands between two of them.
  f, params, args = MODELS["leading_axes"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)
  assert same(
    outputs_and_gradients(quantised, params, *args),
    run(quantised, params, *args),
  )


def test_weight_on_the_left():
  dims = (((0,), (1,)), ((), ()))
  f = lambda w, x: lax.dot_general(w, x, dims)
  hand = lambda w, x: fp4jax.dot(w, x, dims, recipe=RNE, weight="lhs")
  w = normal(0, D, 8)
  got = run(fp4jax.quantize(f, ALL), w, X)
  assert same(got, run(hand, w, X)) and not same(got, run(f, w, X))


def test_experts():
  """A batched weight: each expert's product is an operand of its own."""
  w, x = normal(0, 3, D, 8), normal(1, 3, 4, D)
  x = x * jnp.array([1.0, 100.0, 0.01])[:, None, None]
  dims = (((2,), (1,)), ((0,), (0,)))
  hand = run(lambda w, x: fp4jax.dot(x, w, dims, recipe=RNE), w, x)
  batched = fp4jax.quantize(lambda w, x: jnp.einsum("ecd,edf->ecf", x, w), ALL)
  mapped = fp4jax.quantize(lambda w, x: jax.vmap(plain)(x, w), ALL)
  assert same(run(batched, w, x), hand)
  assert same(run(mapped, w, x), hand)
  each = [run(by_hand_swapped, w[i], x[i])[0] for i in range(3)]
  assert_close(
    hand[0] / x.max((1, 2), keepdims=True),
    jnp.stack(each) / x.max((1, 2), keepdims=True),
  )


def by_hand_swapped(w, x):
  return by_hand(x, w)


def test_members_that_share_their_input_are_one_wide_layer():
  """vmap over weights alone makes one product of them: one tensor scale."""
  w = normal(0, 2, D, 8) * jnp.array([1.0, 30.0])[:, None, None]
  f = lambda w, x: jax.vmap(plain, (None, 0))(x, w)
  out, grad = run(fp4jax.quantize(f, ALL), w, X)
  wide = w.transpose(1, 0, 2).reshape(D, 16)
  wide_out, wide_grad = run(by_hand_swapped, wide, X)
  assert same(out, wide_out.reshape(8, 2, 8).transpose(1, 0, 2))
  assert same(grad, wide_grad.reshape(D, 2, 8).transpose(1, 0, 2))


def test_b15_three_dimensional_kernels_by_einsum():
  w, x = normal(0, D, 2, 4), normal(1, 2, 3, D)
  f = fp4jax.quantize(lambda w, x: jnp.einsum("btd,dnh->btnh", x, w), ALL)
  out, grad = run(f, w, x)
  flat_out, flat_grad = run(by_hand_swapped, w.reshape(D, 8), x.reshape(6, D))
  assert same(out.reshape(6, 8), flat_out)
  assert same(grad.reshape(D, 8), flat_grad)


def test_while_loops_run_quantised():
  """Not differentiable in JAX: the forward pass, condition included."""

  def f(mm, w, x):
    cond = lambda state: (state[0] < 3) & (mm(state[1], w).sum() < 1e9)
    body = lambda state: (state[0] + 1, jnp.tanh(mm(state[1], w)))
    return lax.while_loop(cond, body, (0, x))

  w = normal(0, D, D)
  got = jax.jit(fp4jax.quantize(functools.partial(f, plain), ALL))(w, X)
  assert same(got, jax.jit(functools.partial(f, by_hand))(w, X))
  assert not same(got, jax.jit(functools.partial(f, plain))(w, X))


# Scans over layers


def unrolled_by_layer(layers, p, x, reverse=False):
  ys = {}
  order = range(len(p))
  for i in reversed(order) if reverse else order:
    x = jax.nn.relu((by_hand if i in layers else plain)(x, p[i]))
    ys[i] = x[0]
  return x, jnp.stack([ys[i] for i in order])


@pytest.mark.parametrize("reverse", [False, True])
def test_b15_scans_split_by_layer_equal_the_unrolled_model(reverse):
  """BF16 head, quantised middle, BF16 tail: outputs and stacked gradients."""

  def scanned(p, x):
    def block(x, w):
      y = jax.nn.relu(x @ w)  # Exact, however it is fused.
      return y, y[0]

    return lax.scan(block, x, p, reverse=reverse)

  policy = Policy(
    rules=(
      Rule(path="**", layers=0, recipe=None),
      Rule(path="**", layers=slice(-2, None), recipe=None),
    ),
    default=RNE,
  )
  params = normal(0, 6, D, D)
  hand = functools.partial(unrolled_by_layer, {1, 2, 3}, reverse=reverse)
  out, grads = run(fp4jax.quantize(scanned, policy), params, X)
  hand_out, hand_grads = run(hand, params, X)
  assert same((out, grads[1:4]), (hand_out, hand_grads[1:4]))
  # A scan of one plain layer may be compiled to another order of sums.
  assert_close(grads, hand_grads)
  assert not same(out, run(scanned, params, X)[0])


def test_nested_scans_split_in_execution_order():
  def scanned(p, x):
    inner = lambda x, w: (jnp.tanh(x @ w), None)
    outer = lambda x, ws: lax.scan(inner, x, ws)
    return lax.scan(outer, x, p)[0]

  def hand(p, x):
    for i, w in enumerate(p.reshape(6, D, D)):
      x = jnp.tanh((plain if i in (2, 3) else by_hand)(x, w))
    return x

  policy = Policy(
    rules=(Rule(path="**", layers={2, 3}, recipe=None),), default=RNE
  )
  params = normal(0, 2, 3, D, D)
  assert same(
    run(fp4jax.quantize(scanned, policy), params, X), run(hand, params, X)
  )


def test_an_unstacked_weight_in_a_scan_has_no_layers():
  f, params, args = MODELS["loop_with_an_index"]
  policy = Policy(rules=(Rule(path="a", layers=0, recipe=None),), default=RNE)
  with pytest.raises(fp4jax.PolicyError, match="fori_loop"):
    fp4jax.quantize(functools.partial(f, plain), policy)(params, *args)


# Random streams


def test_streams_are_those_of_site_and_layer():
  """Bit for bit the hand-made streams: site number, iteration of its loops."""

  def f(mm, p, x):
    x = mm(x, p["a"], 0, 0)

    def block(x, iw):
      i, w = iw
      return jnp.tanh(mm(mm(x, w[0], 1, i), w[1], 2, i)), None

    return lax.scan(block, x, (jnp.arange(3), p["b"]))[0]

  key = jax.random.key(7)
  hand = lambda x, w, site, i: by_hand(
    x, w, recipe=SR, key=streams(key, site, i)
  )
  ignore = lambda x, w, site, i: x @ w
  params = {"a": normal(0, D, D), "b": normal(1, 3, 2, D, D)}
  quantised = fp4jax.quantize(functools.partial(f, ignore), ALL_SR)
  got = run(quantised, params, X, fp4_key=key)
  assert same(got, run(functools.partial(f, hand), params, X))
  other = run(quantised, params, X, fp4_key=jax.random.key(8))
  assert same(got[0], other[0])
  assert all(
    (a != b).any()
    for a, b in zip(
      jax.tree.leaves(got[1]), jax.tree.leaves(other[1]), strict=True
    )
  )


def test_d05_layers_of_a_scan_draw_different_bits():
  """Equal weights and cotangents in each layer, different rounding."""

  def f(p, x):
    # A layer whose output nothing reads gets the same cotangent in each step.
    return lax.scan(lambda c, w: (c, x @ w), 0.0, p)[1]

  w = jnp.broadcast_to(normal(0, D, 8), (4, D, 8))
  quantised = fp4jax.quantize(f, ALL_SR)
  for split in (
    ALL_SR,
    Policy(rules=(Rule(path="**", layers=3, recipe=None),), default=SR),
  ):
    quantised = fp4jax.quantize(f, split)
    _, grads = run(quantised, w, X, fp4_key=jax.random.key(0))
    pairs = [(0, 1), (0, 2), (1, 2), (0, 3)]
    assert all((grads[i] != grads[j]).any() for i, j in pairs)


def test_e01_equal_sites_draw_different_bits():
  def f(p, x):
    return x @ p["a"], x @ p["b"]

  w = normal(0, D, 8)
  quantised = fp4jax.quantize(f, ALL_SR)
  (ya, yb), grads = run(
    quantised, {"a": w, "b": w}, X, fp4_key=jax.random.key(0)
  )
  assert same(ya, yb)
  assert (grads["a"] != grads["b"]).mean() > 0.3


def test_e09_recomputation_rounds_alike():
  """Gradients with and without remat: the same bits, SR on, scans too."""

  def f(wrap, p, x):
    block = wrap(lambda w, x: jax.nn.relu(x @ w))
    x = block(p["a"], x)
    layer = wrap(lambda x, w: (jax.nn.relu(x @ w), None))
    return lax.scan(layer, x, p["b"])[0]

  params = {"a": normal(0, D, D), "b": normal(1, 2, D, D)}
  gradient = lambda f: run(f, params, X, fp4_key=jax.random.key(3))
  quantised = fp4jax.quantize(functools.partial(f, lambda g: g), ALL_SR)
  expected = gradient(quantised)
  assert same(gradient(jax.checkpoint(quantised)), expected)
  for policy in (
    None,
    jax.checkpoint_policies.dots_saveable,
    jax.checkpoint_policies.save_only_these_names(fp4jax.RESIDUAL),
  ):
    remat = functools.partial(jax.checkpoint, policy=policy)
    inside = fp4jax.quantize(functools.partial(f, remat), ALL_SR)
    assert same(gradient(inside), expected), policy


def test_missing_keys_are_missed_only_by_gradients():
  f, params, args = MODELS["dense"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL_SR)
  out = jax.jit(quantised)(params, *args)
  assert same(out, run(functools.partial(f, by_hand), params, *args)[0])
  # The forward pass does not depend on the key.
  assert same(out, jax.jit(quantised)(params, *args, fp4_key=jax.random.key(0)))
  for how in (run, outputs_and_gradients):
    with pytest.raises(fp4jax.MissingKeyError, match=r"site [ac]: .*fp4_key="):
      how(quantised, params, *args)


@pytest.mark.parametrize("kind", ["typed", "raw", "rbg"])
def test_c01_keys_of_every_kind(kind):
  f, params, args = MODELS["leading_axes"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL_SR)
  make = {
    "typed": jax.random.key,
    "raw": jax.random.PRNGKey,
    "rbg": lambda seed: jax.random.key(seed, impl="rbg"),
  }[kind]
  first, again, other = (
    run(quantised, params, *args, fp4_key=make(seed)) for seed in (1, 1, 2)
  )
  assert same(first, again) and not same(first[1], other[1])
  hand = lambda x, w: by_hand(x, w, recipe=SR, key=streams(make(1), 0))
  assert same(first, run(functools.partial(f, hand), params, *args))


@pytest.mark.parametrize(
  "key",
  [0, np.zeros(3, np.uint32), jax.random.split(jax.random.key(0), 2)],
  ids=["int", "shape", "two keys"],
)
def test_a_bad_key_says_what_to_pass(key):
  f, params, args = MODELS["leading_axes"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)
  with pytest.raises((ValueError, TypeError), match="fp4_key.*jax.random.key"):
    quantised(params, *args, fp4_key=key)


def test_c15_vmap_of_grad_of_scan_with_integers_and_keys():
  def loss(p, x, label, key):
    def f(p, x, label):
      h = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]
      return -jax.nn.log_softmax(h)[0, label]

    return fp4jax.quantize(f, ALL_SR)(p, x, label, fp4_key=key)

  p, xs = normal(0, 3, D, D), normal(1, 4, 1, D)
  labels = jnp.arange(4, dtype=jnp.int32)
  typed = jax.random.split(jax.random.key(0), 4)
  grad = jax.grad(loss)
  mapped = jax.jit(jax.vmap(grad, (None, 0, 0, 0)))
  got = mapped(p, xs, labels, typed)
  each = jax.jit(grad)
  one_by_one = [each(p, *a) for a in zip(xs, labels, typed, strict=True)]
  assert_close(got, jnp.stack(one_by_one))
  assert same(got, mapped(p, xs, labels, jax.random.key_data(typed)))


# Composition with JAX


@pytest.mark.parametrize(
  "in_axes", [(None, 0), (0, None), (0, 0)], ids=["x", "w", "both"]
)
def test_vmap_quantises_each_example_by_itself(in_axes):
  """The scales are each example's own, as in a loop over the examples."""
  size = jnp.array([1.0, 30.0, 1e-3])
  w, x = normal(0, D, 8), X
  spread = lambda a, axis: a if axis is None else a * size[:, None, None]
  w, x = spread(w, in_axes[0]), spread(x, in_axes[1])
  f = fp4jax.quantize(lambda w, x: jnp.tanh(x @ w), ALL)
  step = lambda w, x: outputs_and_gradients(f, w, x)
  got = jax.jit(jax.vmap(step, in_axes))(w, x)
  one = jax.jit(step)
  pick = lambda a, axis, i: a if axis is None else a[i]
  for i in range(3):
    expected = one(pick(w, in_axes[0], i), pick(x, in_axes[1], i))
    assert_close(jax.tree.map(lambda a, i=i: a[i], got), expected)


def test_transformations_and_abstract_evaluation():
  f, params, args = MODELS["dense"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)
  out, grads = run(quantised, params, *args)
  shape = jax.eval_shape(quantised, params, *args)
  assert (shape.shape, shape.dtype) == (out.shape, out.dtype)
  assert (
    jax.make_jaxpr(quantised)(params, *args).out_avals[0].shape == out.shape
  )
  y, vjp = jax.jit(lambda p: jax.vjp(lambda p: quantised(p, *args), p))(params)
  assert same(y, out)
  assert_close(jax.jit(vjp)(2 * y)[0], grads)
  loss = lambda p: (quantised(p, *args) ** 2).sum()
  value, g = jax.jit(jax.value_and_grad(loss))(params)
  assert_close((value, g), (jax.jit(loss)(params), grads))
  y, linear = jax.linearize(lambda p: quantised(p, *args), params)
  assert same(y, quantised(params, *args))
  transposed = jax.linear_transpose(linear, params)
  assert_close(transposed(2 * y)[0], grads)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "scan"])
def test_closures_over_traced_values(transform):
  """A model function made inside a step may use what the step computes."""
  w = normal(0, D, 8)

  def f(mm, scale):
    model = lambda w, x: mm(x, w) * scale
    model = fp4jax.quantize(model, ALL) if mm is plain else model
    return model(w, X).sum()

  outer = {
    "jit": jax.jit,
    "grad": lambda f: jax.jit(jax.grad(f)),
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, x)[1],
  }[transform]
  scale = jnp.float32(3) if transform in ("jit", "grad") else jnp.ones(3)
  assert_close(
    outer(functools.partial(f, plain))(scale),
    outer(functools.partial(f, by_hand))(scale),
  )


def remat_products(policy):
  """Products in the gradient of two layers under a remat policy."""
  block = lambda p, x: (x @ p["a"]) @ p["b"]
  f = fp4jax.quantize(jax.checkpoint(block, policy=policy), ALL)
  params = {"a": normal(0, D, D), "b": normal(1, D, 8)}
  jaxpr = jax.make_jaxpr(jax.grad(lambda p: f(p, X).sum()))(params)
  return str(jaxpr).count("dot_general[")


def test_g07_remat_policies_are_kept():
  """4 GEMMs of the two layers' gradients, 2 forward, 1 done again or none."""
  policies = jax.checkpoint_policies
  again = remat_products(policies.nothing_saveable)
  kept = remat_products(policies.save_only_these_names(fp4jax.RESIDUAL))
  assert (again, kept) == (remat_products(None), again - 1)


def test_names_of_inner_functions_are_kept():
  @jax.jit
  def my_layer(w, x):
    return x @ w

  f = fp4jax.quantize(lambda w, x: my_layer(w, x), ALL)
  assert "name=my_layer" in str(jax.make_jaxpr(f)(normal(0, D, 8), X))


def test_forward_mode_is_refused():
  f, params, args = MODELS["dense"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)
  with pytest.raises(TypeError, match="custom_vjp"):
    jax.jvp(lambda p: quantised(p, *args), (params,), (params,))


@pytest.mark.parametrize("jit", [False, True])
def test_differentiating_inside_warns(jit, recwarn):
  """The derivative of a quantised function is the recipe's; that of a plain
  one, quantised afterwards, is not. The former does not warn."""
  w, x = jnp.ones((32, 16)), jnp.ones((8, 32))
  loss = lambda w, x: ((x @ w) ** 2).sum()
  gradient = jax.grad(loss)
  gradient = jax.jit(gradient) if jit else gradient
  jax.grad(fp4jax.quantize(loss, ALL))(w, x)
  assert not recwarn.list
  fp4jax.quantize(gradient, policies.bf16())(w, x)
  assert not recwarn.list
  with pytest.warns(UserWarning, match="differentiate what quantize returns"):
    fp4jax.quantize(gradient, ALL)(w, x)


def test_data_in_the_place_of_the_parameters_warns(recwarn):
  """One array there, and what looks more like parameters elsewhere."""
  w, x = normal(0, D, 8), X
  variables = {"params": {"w": w}}
  second = lambda x, v: x @ v["params"]["w"]
  layer = nnx.Linear(D, 8, rngs=nnx.Rngs(0))

  def closed(w):
    return fp4jax.quantize(lambda x: x @ w, ALL)(x)

  for call, match in (
    (lambda: fp4jax.quantize(second, ALL)(x, variables), "params_argnums=1"),
    (
      lambda: fp4jax.quantize(second, ALL)(x, v=variables),
      "argument v is a",
    ),
    (
      lambda: fp4jax.quantize(lambda x, m: m(x), ALL)(x, layer),
      r"nnx module \(Linear\).*params_argnums=1",
    ),
    (lambda: closed(w), r"closes over float32\[16,8\].*pass the parameters"),
    (lambda: jax.jit(closed)(w), r"closes over float32\[16,8\]"),
    (lambda: fp4jax.coverage(fp4jax.quantize(lambda x: x @ w, ALL), x), "clos"),
  ):
    with pytest.warns(UserWarning, match=match) as caught:
      call()
    assert [warning.filename for warning in caught] == [__file__]
  # Parameters in their place, one array or not, with data around.
  fp4jax.quantize(second, ALL, params_argnums=1)(x, variables)
  fp4jax.quantize(lambda x, m: m(x), ALL, params_argnums=1)(x, layer)
  fp4jax.quantize(lambda w, x, b: x @ w + b["b"], ALL)(w, x, {"b": w[0]})
  fp4jax.quantize(lambda w, x, m=w[0]: x @ w + m, ALL)(w, x)
  fp4jax.quantize(lambda p, y: y @ p["w"] + x @ w, ALL)({"w": w}, x)
  jax.jit(jax.vmap(fp4jax.quantize(plain, ALL)))(x[None], w[None])
  assert not recwarn.list


@pytest.mark.slow  # nightly: traces everything once more
def test_nothing_leaks():
  f, params, args = MODELS["rematerialised_scan"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL_SR)
  with jax.checking_leaks():
    got = run(quantised, params, *args, fp4_key=jax.random.key(0))
    quantised(params, *args)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(got))


def test_one_trace_and_one_compilation():
  traces = {"model": 0, "step": 0}

  def f(p, x):
    traces["model"] += 1
    return jnp.tanh(x @ p["a"]) @ p["b"]

  quantised = fp4jax.quantize(f, ALL_SR)
  params = {"a": normal(0, D, D), "b": normal(1, D, 8)}
  for seed in range(3):
    quantised(params, X + seed)
  assert traces["model"] == 1

  @jax.jit
  def step(params, x, key):
    traces["step"] += 1
    loss = lambda p: quantised(p, x, fp4_key=key).sum()
    return jax.grad(loss)(params)

  for seed in range(3):
    step(params, X + seed, jax.random.key(seed))
  assert traces == {"model": 1, "step": 1} and step._cache_size() == 1
  quantised(params, X[:4])
  assert traces["model"] == 2
  fp4jax.coverage(quantised, params, X)
  assert traces["model"] == 2


def test_eager_calls_compile_once():
  f, params, args = MODELS["scan_of_stacked_weights"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)
  quantised(params, *args)
  with jax.log_compiles(False), count_compilations() as compiled:
    quantised(params, *args)
  assert not compiled


class count_compilations:
  """Collects the names of what is compiled inside."""

  def __enter__(self):
    self.events = []
    self._on = lambda event, duration, **kwargs: (
      self.events.append(event) if "backend_compile" in event else None
    )
    jax.monitoring.register_event_duration_secs_listener(self._on)
    return self.events

  def __exit__(self, *unused):
    jax.monitoring.unregister_event_duration_listener(self._on)


def test_donated_buffers():
  f, params, args = MODELS["dense"]
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)

  def step(params, x):
    grads = outputs_and_gradients(quantised, params, x)[1]
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

  expected = jax.jit(step)(params, *args)
  copies = jax.tree.map(jnp.copy, params)
  assert same(jax.jit(step, donate_argnums=0)(copies, *args), expected)
  # A donating jit inside the model.
  inner = jax.jit(lambda x, w: x @ w, donate_argnums=0)
  f = lambda w, x: inner(x * 2, w)
  w = params["c"]
  assert same(
    jax.jit(fp4jax.quantize(f, ALL))(w, X), run(by_hand_swapped, w, X * 2)[0]
  )


# Arguments


def test_static_arguments_and_keyword_arguments():
  def f(mm, p, x, train, mode, nothing, count, *, scale=1, mask=None):
    assert train is True and nothing is None and isinstance(count, int)
    for _ in range(count):
      x = mm(x, p["a"])
    x = jnp.tanh(x) if mode == "tanh" else x
    return {"y": x * scale + (0 if mask is None else mask), "mode": None}

  params = {"a": normal(0, D, D), "name": None}
  args = (X, True, "tanh", None, 2)
  kwargs = {"scale": 3, "mask": jnp.ones(D)}
  quantised = fp4jax.quantize(functools.partial(f, plain), ALL)
  eager = quantised(params, *args, **kwargs)
  expected = f(by_hand, params, *args, **kwargs)
  assert same(eager, expected)
  assert not same(eager, f(plain, params, *args, **kwargs))
  # 1, 1.0 and True are different static arguments.
  g = fp4jax.quantize(lambda w, x, s: (x @ w, x.astype(type(s)))[1], ALL)
  dtypes = {g(params["a"], X, s).dtype.kind for s in (True, 1, 1.0)}
  assert dtypes == {"b", "i", "f"}
  # So are 0.0 and -0.0; NaN equals itself.
  traces = []

  def h(w, x, s):
    traces.append(s)
    return x @ w + np.copysign(1.0, s)

  h = fp4jax.quantize(h, policies.bf16())
  ys = [h(params["a"], X, s) for s in (0.0, -0.0, np.nan, np.nan)]
  assert (ys[0] != ys[1]).all() and len(traces) == 3


def test_unhashable_static_arguments():
  f = lambda w, x, options: x @ w * options.scale

  class Options:
    __hash__ = None
    scale = 2

  w = normal(0, D, 8)
  got = fp4jax.quantize(f, ALL)(w, X, Options())
  assert same(got, by_hand(X, w) * 2)


def test_parameters_in_several_arguments():
  f = lambda x, p, q: (x @ p["w"]) @ q
  p, q = {"w": normal(0, D, D)}, normal(1, D, 8)
  hand = by_hand(by_hand(X, p["w"]), q)
  assert same(fp4jax.quantize(f, ALL, params_argnums=(1, 2))(X, p, q), hand)
  assert same(fp4jax.quantize(f, ALL, params_argnums=(1, -1))(X, p, q), hand)
  only = fp4jax.quantize(f, ALL, params_argnums=1)(X, p, q)
  assert same(only, by_hand(X, p["w"]) @ q)


def test_numpy_arguments_and_structures():
  f = lambda p, x: {"out": [x["x"] @ p[0][1]], "n": x["n"]}
  w = np.asarray(normal(0, D, 8))
  got = fp4jax.quantize(f, ALL)(
    [(w, w)], {"x": np.asarray(X), "n": np.int32(3)}
  )
  assert same(got["out"][0], by_hand(X, w)) and got["n"] == 3


def test_signature_name_and_arguments_of_the_function_are_kept():
  def apply(params, x):
    """Docs."""
    return x @ params

  quantised = fp4jax.quantize(apply, ALL)
  assert (quantised.__name__, quantised.__doc__) == ("apply", "Docs.")


def test_a_quantised_function_prints_its_name_and_policy():
  policy = policies.nemotron(1, 0, recipe=RNE)
  assert repr(fp4jax.quantize(plain, policy)) == (
    "<quantised plain: embeddings and heads → as written; first block → as"
    " written; default → fp8>"
  )
  nameless = fp4jax.quantize(functools.partial(plain), ALL)
  assert repr(nameless) == "<quantised partial: default → fp8>"


@pytest.mark.parametrize(
  "make, match",
  [
    (lambda: fp4jax.quantize(plain, RNE), "is no fp4jax.Policy; pass"),
    (
      lambda: fp4jax.quantize(plain, RNE),
      r"policy=.{,60} is no.*fp4jax.Policy\(default=recipe\)",
    ),
    (lambda: fp4jax.quantize(plain, None), "policies.all_linear"),
    (
      lambda: fp4jax.quantize(fp4jax.quantize(plain, ALL), ALL),
      "<quantised plain: .*> is quantised already",
    ),
    (lambda: fp4jax.quantize({"w": 1}, ALL), "is not callable"),
    (lambda: fp4jax.quantize(plain, ALL)(), "by position"),
    (
      lambda: fp4jax.quantize(plain, ALL, params_argnums=3)(X, X),
      "params_argnums=.*2 positional",
    ),
    (lambda: fp4jax.quantize(plain, ALL, backend="cuda"), "backend='cuda'"),
    *(
      (
        lambda bad=bad: fp4jax.quantize(plain, ALL, params_argnums=bad),
        "params_argnums=.*needed the positions.*params_argnums=0",
      )
      for bad in ("params", 1.0, True, (0, True), (), None)
    ),
    (lambda: fp4jax.coverage(plain, X, X), "fp4jax.quantize"),
  ],
)
def test_errors_say_what_to_do(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def test_integer_parameters_are_no_weights():
  f = lambda p, x: (x @ p["w"]) + p["n"]
  params = {"w": normal(0, D, 8), "n": jnp.int32(3)}
  got = jax.jit(fp4jax.quantize(f, ALL))(params, X)
  assert same(got, jax.jit(lambda p, x: by_hand(x, p["w"]) + p["n"])(params, X))


# x64 and several devices


@pytest.mark.slow  # nightly: three models, compiled four times each
def test_c11_x64_changes_no_bit():
  """Everything FP32 and BF16 is as without x64; FP64 stays FP64."""

  def results():
    jax.clear_caches()
    found = []
    for name in ("dense", "mixed_precision", "scan_of_stacked_weights"):
      f, params, args = MODELS[name]
      quantised = fp4jax.quantize(functools.partial(f, plain), ALL_SR)
      key = jax.random.key(5)
      found.append(run(quantised, params, *args, fp4_key=key))
    return found

  off = results()
  with jax.enable_x64(True):
    on = results()
    assert same(on, off)
    w, x = (normal(i, D, D, dtype="float64") for i in (0, 1))
    out, grad = run(fp4jax.quantize(lambda w, x: x @ w, ALL), w, x)
    assert out.dtype == grad.dtype == jnp.float64
    assert same((out, grad), run(by_hand_swapped, w, x))
  jax.clear_caches()


SHARD_MAP = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import fp4jax
from tests.test_transform import ALL, ALL_SR, RNE, normal, assert_close, same

assert jax.device_count() == 4
x, w = normal(0, 16, 32), normal(1, 32, 8)
x = x * jnp.arange(1, 17)[:, None]  # Each shard has another amax.
one = fp4jax.quantize(lambda w, x: jnp.tanh(x @ w), ALL)

def loss(f, w, x):
  y = f(w, x)
  return (y ** 2).sum(), y

step = lambda f: jax.jit(
    jax.value_and_grad(functools.partial(loss, f), argnums=(0, 1), has_aux=True)
)
(_, y), grads = step(one)(w, x)
(_, plain_y), _ = step(lambda w, x: jnp.tanh(x @ w))(w, x)
assert not same(y, plain_y)
for kind in (AxisType.Auto, AxisType.Explicit):
  mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
  specs = dict(mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
  place = lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s))
  args = place(w, P()), place(x, P("d"))
  inner = jax.shard_map(one, **specs)
  outer = fp4jax.quantize(
      jax.shard_map(lambda w, x: jnp.tanh(x @ w), **specs), ALL)
  for f in (inner, outer):
    with jax.set_mesh(mesh):
      (_, ys), sharded = step(f)(*args)
    assert same(np.asarray(ys), np.asarray(y)), kind
    assert_close(sharded, grads)
# The same layer partitioned by the compiler.
mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
put = lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s))
args = [put(w, P()), put(x, P("d"))]
(_, ys), sharded = step(one)(*args)
assert same(np.asarray(ys), np.asarray(y))
assert_close(sharded, grads)
print("passed")
"""


def test_c07_inside_shard_map_on_four_devices():
  """Default check_vma: amax is global, gradients are not multiplied by 4."""
  flags = "--xla_force_host_platform_device_count=4"
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(SHARD_MAP)],
    env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0 and "passed" in done.stdout, done.stderr[-3000:]
