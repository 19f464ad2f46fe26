"""Contract of ``fp4jax.quantize`` on Flax NNX: modules work unchanged.

``quantize(lambda model, x: model(x), policy)`` takes an ``nnx.Module`` or its
``(graphdef, state)`` and equals, under nearest rounding and bit for bit, the
module with ``fp4jax.dot`` injected through flax's ``dot_general`` arguments.
State that the call writes (BatchNorm, Rngs) arrives as if the plain module had
been called.
"""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
PLAIN = jax.lax.dot_general


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


X = normal(9, 2, 3, D)


def call(model, *args):
  return model(*args)


QUANTISED = fp4jax.quantize(call, ALL)
LEFT = fp4jax.quantize(call, policies.bf16())


def same(a, b):
  """Whether two trees are equal bit for bit, dtypes and structure too."""
  leaves_a, tree_a = jax.tree.flatten(a)
  leaves_b, tree_b = jax.tree.flatten(b)
  return tree_a == tree_b and all(
    u.dtype == v.dtype and np.array_equal(u, v)
    for u, v in zip(leaves_a, leaves_b, strict=True)
  )


def values(state):
  """The arrays of a module or state by path."""
  state = nnx.state(state) if isinstance(state, nnx.Module) else state
  return {
    "/".join(map(str, path)): np.asarray(
      jax.random.key_data(v[...])
      if jnp.issubdtype(v[...].dtype, jax.dtypes.prng_key)
      else v[...]
    )
    for path, v in nnx.to_flat_state(state)
  }


def loss(f, model, *args):
  out = f(model, *args)
  return (out.astype(jnp.float32) ** 2).sum(), out


def run(f, model, *args):
  """Outputs, gradients and the module's state after one jitted step."""
  step = nnx.jit(nnx.value_and_grad(functools.partial(loss, f), has_aux=True))
  (_, out), grads = step(model, *args)
  return out, values(grads), values(model)


def check(make, *args):
  """``make(dot)`` builds a module from dot_general and fixed Rngs."""
  got = run(QUANTISED, make(PLAIN), *args)
  assert same(got, run(call, make(by_hand), *args))
  plain = run(call, make(PLAIN), *args)
  assert not same(got[0], plain[0]) and not same(got[1], plain[1])
  assert same(run(LEFT, make(PLAIN), *args), plain)


# Modules


MODULES = {
  "Linear": lambda dot: nnx.Linear(D, 8, dot_general=dot, rngs=nnx.Rngs(0)),
  "Linear bf16": lambda dot: nnx.Linear(
    D, 8, dtype=jnp.bfloat16, dot_general=dot, rngs=nnx.Rngs(0)
  ),
  "LinearGeneral": lambda dot: nnx.LinearGeneral(
    (3, D), (2, 4), axis=(-2, -1), dot_general=dot, rngs=nnx.Rngs(0)
  ),
  "MultiHeadAttention": lambda dot: nnx.MultiHeadAttention(
    num_heads=2,
    in_features=D,
    qkv_features=8,
    decode=False,
    qkv_dot_general=dot,
    out_dot_general=dot,
    rngs=nnx.Rngs(0),
  ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
  check(MODULES[name], X)


class ByHandEinsum(nnx.Einsum):
  def __call__(self, x):
    return (
      jnp.einsum(self.einsum_str, x, self.kernel[...], _dot_general=by_hand)
      + self.bias[...]
    )


def test_einsum():
  def make(dot):
    kind = ByHandEinsum if dot is by_hand else nnx.Einsum
    return kind("btd,dnh->btnh", (D, 2, 4), (2, 4), rngs=nnx.Rngs(0))

  check(make, X)


class Tied(nnx.Module):
  """A lookup, a layer, and the same table again as the head."""

  def __init__(self, dot, rngs):
    self.dot = dot
    self.embed = nnx.Embed(10, D, rngs=rngs)
    self.up = nnx.Linear(D, D, dot_general=dot, rngs=rngs)

  def __call__(self, ids):
    x = self.up(self.embed(ids))
    if self.dot is PLAIN:
      return self.embed.attend(x)
    table = self.embed.embedding[...].T
    return by_hand(x, table, (((x.ndim - 1,), (0,)), ((), ())))


def test_embed_attend():
  make = lambda dot: Tied(dot, nnx.Rngs(0))
  check(make, jnp.array([[3, 9], [0, 3]]))


class Convolved(nnx.Module):
  def __init__(self, dot, rngs):
    self.conv = nnx.Conv(D, D, (3,), rngs=rngs)
    self.out = nnx.Linear(D, 8, dot_general=dot, rngs=rngs)

  def __call__(self, x):
    return self.out(self.conv(x))


def test_conv_is_listed_and_left_alone():
  check(lambda dot: Convolved(dot, nnx.Rngs(0)), X)
  model = Convolved(PLAIN, nnx.Rngs(0))
  conv, out = fp4jax.coverage(QUANTISED, model, X).rows
  assert conv.path == "conv/kernel" and "convolutions" in conv.reason
  assert not conv.quantised and out.path == "out/kernel" and out.quantised
  just_conv = fp4jax.quantize(lambda m, x: (m.conv(x), m(x)), ALL)
  assert same(just_conv(model, X)[0], model.conv(X))


# State


class Stateful(nnx.Module):
  """BatchNorm's statistics, Dropout's stream, and a counter."""

  def __init__(self, dot=PLAIN, seed=0):
    rngs = nnx.Rngs(seed)
    self.first = nnx.Linear(D, D, dot_general=dot, rngs=rngs)
    self.norm = nnx.BatchNorm(D, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.out = nnx.Linear(D, 8, dot_general=dot, rngs=rngs)
    self.calls = nnx.Variable(jnp.int32(0))

  def __call__(self, x):
    self.calls[...] += 1
    return self.out(self.drop(self.norm(self.first(x))))


def test_state_arrives_as_from_the_plain_module():
  """Two eager calls, then a jitted gradient: streams advance alike."""
  got, plain = Stateful(), Stateful()
  hand = Stateful(by_hand)
  before = values(got)
  for _ in range(2):
    y, h, p = QUANTISED(got, X), hand(X), plain(X)
    np.testing.assert_allclose(y, h, rtol=1e-5, atol=1e-5)
    assert (y != p).any()
  assert got.calls[...] == 2
  random = [k for k in before if "drop" in k]
  assert random and all(
    np.array_equal(values(got)[k], values(plain)[k]) for k in random
  )
  assert any((before[k] != values(got)[k]).any() for k in random)
  # Running means: those of the quantised first layer.
  mean = "norm/mean"
  np.testing.assert_allclose(values(got)[mean], values(hand)[mean], rtol=1e-5)
  assert (values(got)[mean] != before[mean]).any()
  assert (values(got)[mean] != values(plain)[mean]).any()
  check(Stateful, X)


class Scale(nnx.Pytree):
  """State of the user's own, no module."""

  def __init__(self):
    self.calls = nnx.Variable(jnp.int32(0))


def stateful_arguments():
  """Every kind of NNX object that is no module, and one module with them."""
  rngs = nnx.Rngs(0, dropout=1)
  return {
    "rngs": rngs,
    "variable": nnx.Variable(jnp.float32(0)),
    "metrics": nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
    "own": Scale(),
    "nested": {"drop": nnx.Dropout(0.5, rngs=rngs), "list": [Scale()]},
  }


def call_with_state(model, x, **state):
  rngs = state["rngs"]
  state["variable"][...] += 1
  state["own"].calls[...] += 1
  state["nested"]["list"][0].calls[...] += 2
  y = nnx.Dropout(0.5)(state["nested"]["drop"](model(x)), rngs=rngs)
  state["metrics"].update(loss=y.sum())
  return y


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_state_outside_of_modules_arrives_too(wrap, shared):
  """Three calls draw three masks, those of the plain function."""
  quantised = fp4jax.quantize(call_with_state, policies.bf16())
  sides = []
  for f in (wrap(quantised), wrap(call_with_state)):
    model, state = Stateful(), stateful_arguments()
    if shared:  # One stream, held by the model and passed besides.
      model.drop = nnx.Dropout(0.5, rngs=state["rngs"])
    ys = [f(model, X, **state) for _ in range(3)]
    sides.append((ys, values(nnx.state([model, state]))))
  (got, got_state), (expected, expected_state) = sides
  assert same([y == 0 for y in got], [y == 0 for y in expected])
  # Not bits: NNX, not jitted, compiles some operations together that run one by
  # one in a quantised function.
  for a, b in zip(
    jax.tree.leaves((got, got_state)),
    jax.tree.leaves((expected, expected_state)),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
  masks = [np.asarray(y == 0) for y in got]
  assert not np.array_equal(masks[0], masks[1])
  assert not np.array_equal(masks[1], masks[2])


def test_state_passed_by_position_in_any_argument():
  """Rngs and a Variable before the parameters, a State as the parameters."""
  graphdef, state = nnx.split(Stateful())

  def f(rngs, state, x, count):
    count[...] += 1
    return nnx.Dropout(0.5)(nnx.merge(graphdef, state)(x), rngs=rngs)

  quantised = fp4jax.quantize(f, ALL, params_argnums=1)
  rngs, count = nnx.Rngs(dropout=1), nnx.Variable(jnp.int32(0))
  ys = [quantised(rngs, state, X, count) for _ in range(2)]
  assert rngs.dropout.count[...] == 2 and count[...] == 2
  assert (ys[0] != ys[1]).any()
  assert state["calls"][...] == 2  # As the plain function does.
  rows = fp4jax.coverage(quantised, rngs, state, X, count).rows
  assert [row.path for row in rows] == ["first/kernel", "out/kernel"]


def test_parameters_are_never_written():
  """The caller's variables stay the same objects with concrete arrays."""
  model = Stateful()
  kernel, array = model.first.kernel, model.first.kernel[...]
  QUANTISED(model, X)
  assert model.first.kernel is kernel and same(kernel[...], array)
  for leaf in jax.tree.leaves(nnx.state(model)):
    assert not isinstance(leaf, jax.core.Tracer)


def test_c05_two_steps_leave_no_tracer():
  """nnx.grad of a jitted quantised model with state, twice."""
  model = Stateful()
  quantised = fp4jax.quantize(call, ALL_SR)
  inner = nnx.jit(lambda m, x, key: quantised(m, x, fp4_key=key))

  def objective(model, x, key):
    return (inner(model, x, key) ** 2).sum()

  for seed in range(2):
    grads = nnx.grad(objective)(model, X, jax.random.key(seed))
    leaves = jax.tree.leaves((nnx.state(model), grads))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
  assert model.calls[...] == 2


def test_a_module_that_grows_in_the_call_is_an_error():
  class Sowing(nnx.Module):
    def __init__(self):
      self.up = nnx.Linear(D, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
      y = self.up(x)
      self.sow(nnx.Intermediate, "y", y)
      return y

  with (
    pytest.warns(DeprecationWarning, match="sow"),
    pytest.raises(ValueError, match="added or removed variables"),
  ):
    QUANTISED(Sowing(), X)


def test_graphdef_and_state():
  """The functional form: the state is an argument, gradients are its tree."""
  model, hand = (MODULES["Linear"](dot) for dot in (PLAIN, by_hand))
  f = lambda pair, x: nnx.merge(*pair)(x)
  quantised = fp4jax.quantize(f, ALL)

  def step(f, model):
    graphdef, state = nnx.split(model)
    objective = lambda state, x: (f((graphdef, state), x) ** 2).sum()
    return jax.jit(jax.value_and_grad(objective))(state, X)

  got = step(quantised, model)
  assert same(got, step(f, hand)) and not same(got, step(f, model))
  (row,) = fp4jax.coverage(quantised, nnx.split(model), X).rows
  assert row.path.endswith("kernel") and row.quantised


def test_a_state_with_more_than_parameters():
  """(graphdef, params, rest) with the parameters second."""
  model = Stateful()
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def f(graphdef, params, rest, x):
    model = nnx.merge(graphdef, params, rest)
    return model(x), nnx.state(model, nnx.BatchStat)

  out, stats = fp4jax.quantize(f, ALL, params_argnums=1)(
    graphdef, params, rest, X
  )
  plain_out, plain_stats = f(graphdef, params, rest, X)
  assert not same(out, plain_out)
  assert jax.tree.structure(stats) == jax.tree.structure(plain_stats)


# Structure


class Shared(nnx.Module):
  """One layer used twice under two names."""

  def __init__(self, dot=PLAIN):
    self.a = nnx.Linear(D, D, dot_general=dot, rngs=nnx.Rngs(0))
    self.b = self.a

  def __call__(self, x):
    return self.b(nnx.relu(self.a(x)))


def test_shared_modules():
  check(Shared, X)
  rows = fp4jax.coverage(QUANTISED, Shared(), X).rows
  assert [row.path for row in rows] == ["a/kernel", "a/kernel"]


class Experts(nnx.Module):
  """Lists of blocks and of experts, mixed by a router."""

  def __init__(self, dots):
    rngs = nnx.Rngs(0)
    self.router = nnx.Linear(D, 2, dot_general=dots[0], rngs=rngs)
    self.layers = nnx.List(
      [
        nnx.List(
          [nnx.Linear(D, D, dot_general=dot, rngs=rngs) for _ in range(2)]
        )
        for dot in dots[1:]
      ]
    )

  def __call__(self, x):
    gates = nnx.softmax(self.router(x))
    for experts in self.layers:
      x = nnx.relu(
        sum(gates[..., i : i + 1] * e(x) for i, e in enumerate(experts))
      )
    return x


def test_lists_of_experts_with_a_policy_by_path():
  make = lambda *dots: Experts(dots)
  check(lambda dot: make(dot, dot, dot), X)
  policy = Policy(
    rules=(
      Rule(path="router/**", recipe=None),
      Rule(path="layers/0/**", recipe=None),
    ),
    default=RNE,
  )
  got = run(fp4jax.quantize(call, policy), make(PLAIN, PLAIN, PLAIN), X)
  assert same(got, run(call, make(PLAIN, PLAIN, by_hand), X))
  by_layer = Policy(
    rules=(
      Rule(path="router/**", recipe=None),
      Rule(path="layers/{layer}/**", layers=slice(0, -1), recipe=None),
    ),
    default=RNE,
  )
  assert same(run(fp4jax.quantize(call, by_layer), make(*3 * [PLAIN]), X), got)
  with pytest.raises(fp4jax.PolicyError, match="layers/0/0/kernel"):
    typo = Policy(rules=(Rule(path="layer/0/**", recipe=None),), default=RNE)
    fp4jax.quantize(call, typo)(make(*3 * [PLAIN]), X)


# Transformations


class Block(nnx.Module):
  def __init__(self, dot, rngs):
    self.up = nnx.Linear(D, D, dot_general=dot, rngs=rngs)

  def __call__(self, x):
    return nnx.relu(self.up(x))


class Stack(nnx.Module):
  """Three stacked blocks under nnx.scan, plain or rematerialised."""

  def __init__(self, dot, remat=False):
    self.remat = remat

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
      return Block(dot, nnx.Rngs(key))

    self.layers = make(jax.random.split(jax.random.key(0), 3))

  def __call__(self, x):
    block = lambda block, x: block(x)
    if self.remat:
      block = nnx.remat(block)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def scan(layer, x):
      return block(layer, x)

    return scan(self.layers, x)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_remat(remat):
  check(functools.partial(Stack, remat=remat), X)


def test_scan_split_by_layers():
  policy = Policy(
    rules=(Rule(path="layers/**", layers=slice(0, 2), recipe=None),),
    default=RNE,
  )
  model = Stack(PLAIN)
  kernels, biases = (v for k, v in sorted(values(model).items(), reverse=True))

  def hand(kernels, x):
    for i in range(3):
      dot = by_hand if i == 2 else PLAIN
      x = dot(x, kernels[i], (((2,), (0,)), ((), ()))) + biases[i]
      x = nnx.relu(x)
    return x

  got = nnx.jit(fp4jax.quantize(call, policy))(model, X)
  np.testing.assert_allclose(got, jax.jit(hand)(kernels, X), rtol=1e-6)
  assert not same(got, nnx.jit(QUANTISED)(model, X))


def test_vmap_of_members():
  """nnx.vmap over stacked members inside the model: scales of each."""

  class Ensemble(nnx.Module):
    def __init__(self, dot):
      make = nnx.vmap(lambda key: Block(dot, nnx.Rngs(key)))
      self.members = make(jax.random.split(jax.random.key(0), 2))

    def __call__(self, x):
      return nnx.vmap(lambda m, x: m(x), in_axes=(0, 0))(self.members, x)

  check(Ensemble, X * jnp.array([1, 50.0])[:, None, None])


# Training


def test_an_optimizer_step_lowers_the_loss():
  """The whole loop: nnx.jit, value_and_grad, Optimizer, fp4_key=rngs.fp4()."""

  class Mlp(nnx.Module):
    def __init__(self, rngs):
      self.first = nnx.Linear(D, D, rngs=rngs)
      self.out = nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x):
      return self.out(nnx.relu(self.first(x)))

  x, y = normal(0, 32, D), normal(1, 32, 4)
  quantised = fp4jax.quantize(call, ALL_SR)
  model = Mlp(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
  rngs = nnx.Rngs(0, fp4=1)
  traces = []

  @nnx.jit
  def train_step(model, optimizer, rngs, x, y):
    traces.append(1)

    key = rngs.fp4()  # NNX counts streams outside of its own gradients.

    def objective(model):
      return ((quantised(model, x, fp4_key=key) - y) ** 2).mean()

    value, grads = nnx.value_and_grad(objective)(model)
    optimizer.update(model, grads)
    return value

  losses = [float(train_step(model, optimizer, rngs, x, y)) for _ in range(30)]
  assert losses[-1] < 0.6 * losses[0]
  assert len(traces) == 1
  assert rngs.fp4.count[...] == 30


def test_fp4_key_of_rngs_gives_other_bits_in_each_step():
  model, rngs = MODULES["Linear"](PLAIN), nnx.Rngs(fp4=1)
  quantised = fp4jax.quantize(call, ALL_SR)
  gradient = nnx.jit(
    nnx.grad(lambda m, key: (quantised(m, X, fp4_key=key) ** 2).sum())
  )
  key = rngs.fp4()
  first, again = gradient(model, key), gradient(model, key)
  other = gradient(model, rngs.fp4())
  assert same(values(first), values(again))
  assert (values(first)["kernel"] != values(other)["kernel"]).any()


@pytest.mark.parametrize("key", [nnx.Rngs(fp4=1).fp4, nnx.Rngs(fp4=1)])
def test_a_stream_in_place_of_a_key_of_it(key):
  quantised = fp4jax.quantize(call, ALL_SR)
  match = r"^fp4_key is a Rng.*call it, as in fp4_key=rngs.fp4\(\)"
  with pytest.raises(ValueError, match=match):
    quantised(MODULES["Linear"](PLAIN), X, fp4_key=key)
  recipe = fp4jax.recipes.nvfp4()
  with pytest.raises(ValueError, match=match):
    fp4jax.dot(X, X, (((1,), (1,)), ((), ())), recipe=recipe, key=key)


def test_a_module_in_place_of_a_function():
  with pytest.raises(ValueError, match="Linear.*lambda model, x: model"):
    fp4jax.quantize(MODULES["Linear"](PLAIN), ALL)
  with pytest.raises(ValueError, match="method of a module.*lambda model, x"):
    fp4jax.quantize(MODULES["Linear"](PLAIN).__call__, ALL)
  with pytest.raises(ValueError, match=r"class \(Linear\).*lambda model, x"):
    fp4jax.quantize(nnx.Linear, ALL)


def test_calls_are_traced_once():
  traces = []

  def counted(model, x):
    traces.append(1)
    return model(x)

  model = Stateful()
  quantised = fp4jax.quantize(counted, ALL)
  for _ in range(3):
    quantised(model, X)
  assert len(traces) == 1
  quantised(Stateful(seed=1), X)  # The same structure, other values.
  assert len(traces) == 1
  model.drop.deterministic = True  # Another structure.
  quantised(model, X)
  assert len(traces) == 2
