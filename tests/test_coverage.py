"""Contract of ``fp4jax.coverage``: every contraction once, and the truth.

Each row is checked against the program: the number of rows against the
contractions of the model's own jaxpr, and what a row says of its GEMMs against
the values that come out: "as written" is the plain model's bits, anything else
is not.
"""

import functools

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import Policy
from fp4jax import Rule
from fp4jax import policies
from fp4jax import recipes

RNE = recipes.fp8("fp8_e4m3")
ALL = policies.all_linear(RNE)
D = 16


def normal(seed, *shape):
  return jnp.asarray(
    np.random.default_rng(seed).standard_normal(shape), "float32"
  )


X = normal(9, 4, D)


def inside(eqn):
  """The jaxprs that an equation holds."""
  for value in eqn.params.values():
    for item in value if isinstance(value, (tuple, list)) else [value]:
      item = getattr(item, "jaxpr", item)
      if hasattr(item, "eqns"):
        yield item


def equations(jaxpr):
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in inside(eqn):
      yield from equations(inner)


def contractions(f, *args):
  """The contractions of a function's jaxpr, at any depth."""
  kinds = ("dot_general", "conv_general_dilated", "ragged_dot_general")
  found = equations(jax.make_jaxpr(f)(*args).jaxpr)
  return [eqn for eqn in found if eqn.primitive.name in kinds]


@jax.custom_vjp
def opaque(w, x):
  return x @ w


opaque.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (g, g))


def everything(p, x):
  """One of each: layers, scores, a conv, loops, rules, products of weights."""
  x = jax.jit(lambda w, x: x @ w)(p["a"], x)
  x = (x @ x.T) @ x
  x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["b"], x)
  x, ys = lax.scan(lambda x, w: (jnp.tanh(x @ w), x @ w), x, p["stack"])
  x = lax.cond(x[0, 0] > 0, lambda x: x @ p["c"], lambda x: x, x)
  x = x + ys.sum() + (p["a"] @ p["b"]).sum()
  x = lax.conv(x[None], p["kernel"], (1,), "SAME")[0]
  x = lax.while_loop(
    lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] @ p["d"]), (0, x)
  )[1]
  return opaque(p["e"], x)


PARAMS = {
  **{k: normal(i, D, D) for i, k in enumerate("abcde")},
  "stack": normal(5, 3, D, D),
  "kernel": normal(6, 4, 4, 3),
}


def test_j03_every_contraction_is_listed_once_in_order():
  """Rows of the table and equations of the jaxpr are the same list."""
  table = fp4jax.coverage(fp4jax.quantize(everything, ALL), PARAMS, X)
  eqns = contractions(everything, PARAMS, X)
  opaque_row = table.rows[-1]
  assert opaque_row.kind == "custom_vjp_call" and not opaque_row.quantised
  assert "keeps its own rules" in opaque_row.reason
  # The product inside the custom_vjp is the opaque row's.
  assert len(table.rows) == len(eqns)
  shapes = [tuple(v.aval.shape for v in e.invars[:2]) for e in eqns[:-1]]
  rows = [(r.lhs_shape, r.rhs_shape) for r in table.rows[:-1]]
  assert rows == shapes
  assert [r.kind for r in table.rows[:-1]] == [
    e.primitive.name for e in eqns[:-1]
  ]
  assert [(r.path, r.quantised) for r in table.rows] == [
    ("a", True),
    ("", False),
    ("", False),
    ("b", True),
    ("stack", True),
    ("stack", True),
    ("c", True),
    ("", False),
    ("kernel", False),
    ("d", True),
    ("", False),
  ]
  reasons = [r.reason for r in table.rows]
  assert reasons[1] == "no operand comes from the parameters"
  assert reasons[7] == "both operands come from the parameters"
  assert "convolutions" in reasons[8]
  assert reasons[0] == "default"


def test_j03_three_quantised_gemms_for_each_dense_of_a_train_step():
  """A step's program holds 3 GEMMs and 5 quantisations a quantised Dense.

  x, w and xᵀ, g, gᵀ; w's codes serve two GEMMs. A plain Dense has 3 GEMMs too.
  """
  model = nn.Sequential([nn.Dense(D), nn.relu, nn.Dense(D), nn.Dense(8)])
  variables = model.init(jax.random.key(0), X)
  rules = (Rule(path="params/layers_2/**", recipe=None),)
  policy = Policy(rules=rules, default=recipes.nvfp4())
  quantised = fp4jax.quantize(model.apply, policy)

  def loss(variables, x):
    return quantised(variables, x, fp4_key=jax.random.key(0)).sum()

  step = jax.value_and_grad(loss, argnums=(0, 1))
  found = list(equations(jax.make_jaxpr(step)(variables, X).jaxpr))
  dots = [e for e in found if e.primitive.name == "dot_general"]
  names = ("_quantize", "_quantize_joined")
  quantise = [e for e in found if e.params.get("name") in names]
  table = fp4jax.coverage(quantised, variables, X)
  assert len(table.rows) == 3 and len(table.quantised) == 2
  assert len(dots) == 3 * len(table.rows)
  assert len(quantise) == 5 * len(table.quantised)
  # A quantised GEMM's operands are decoded codes, in BF16.
  low = [e for e in dots if e.invars[0].aval.dtype == jnp.bfloat16]
  assert len(low) == 3 * len(table.quantised)


def layer_outputs(p, x):
  """What each site computes, by name; scanned ones one a layer."""
  scan = lambda ws: lax.scan(lambda _, w: (None, x @ w), None, ws)[1]
  return {k: scan(w) if w.ndim == 3 else x @ w for k, w in p.items()}


def test_rows_tell_the_truth_layer_by_layer():
  params = {
    "head": normal(0, D, 8),
    "stack": normal(1, 6, D, 8),
    "up": normal(2, D, 8),
  }
  policy = Policy(
    rules=(
      Rule(path="head", recipe=None),
      Rule(path="stack", layers={0, 3}, recipe=None),
      Rule(
        path="stack",
        layers=slice(4, None),
        gemms=("dgrad", "wgrad"),
        recipe=recipes.mxfp8(),
      ),
    ),
    default=RNE,
  )
  quantised = fp4jax.quantize(layer_outputs, policy)
  table = fp4jax.coverage(quantised, params, X)
  rows = [(r.path, r.layers, r.fprop, r.dgrad, r.wgrad) for r in table.rows]
  left, fp8, mx = ("as written",) * 3, (str(RNE.fprop),) * 3, "mxfp8 · mxfp8"
  assert rows == [
    ("head", None, *left),
    ("stack", (0, 0), *left),
    ("stack", (1, 2), *fp8),
    ("stack", (3, 3), *left),
    ("stack", (4, 5), fp8[0], mx, mx),
    ("up", None, *fp8),
  ]
  lines = str(table).splitlines()
  printed = [x.split()[1] for x in lines if x.startswith("stack")]
  assert printed == ["0", "1-2", "3", "4-5"]
  assert '"head"' in table.rows[0].reason
  assert "layers={0, 3}" in table.rows[1].reason
  got = jax.jit(quantised)(params, X)
  plain = jax.jit(layer_outputs)(params, X)
  for row in table.rows:
    first, last = row.layers or (0, 0)
    layers = slice(None) if row.layers is None else slice(first, last + 1)
    pick = lambda tree, path=row.path, layers=layers: tree[path][layers]
    changed = (pick(got) != pick(plain)).reshape(last - first + 1, -1).any(1)
    assert (changed == row.quantised).all(), row


def test_paths_and_module_names():
  """The weight's path is the site's name; linen's module path stands beside."""

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(8, name="head")(nn.Dense(D, name="up")(x))

  variables = Net().init(jax.random.key(0), X)
  table = fp4jax.coverage(fp4jax.quantize(Net().apply, ALL), variables, X)
  assert [r.path for r in table.rows] == [
    "params/up/kernel",
    "params/head/kernel",
  ]
  assert [r.name.split("/")[-1] for r in table.rows] == ["up", "head"]
  merged = lambda p, x: x @ (p["w"] + p["a"] @ p["b"])
  params = {"w": normal(0, D, 8), "a": normal(1, D, 2), "b": normal(2, 2, 8)}
  table = fp4jax.coverage(fp4jax.quantize(merged, ALL), params, X)
  assert [r.path for r in table.rows] == ["", "a + b + w"]


def test_data_among_the_parameters_shows():
  """It counts as a weight: alone it is quantised, with weights it is not."""
  f = lambda p, x: (p["data"] @ p["w"], p["data"].T @ x)
  params = {"data": X, "w": normal(0, D, 8)}
  both, data = fp4jax.coverage(fp4jax.quantize(f, ALL), params, X).rows
  assert not both.quantised and "both operands come" in both.reason
  assert data.quantised and data.path == "data"


def test_closed_over_weights_are_listed():
  w = normal(0, D, D)
  f = lambda p, x: (x @ w) @ p
  quantised = fp4jax.quantize(f, ALL)
  with pytest.warns(UserWarning, match="closes over float32"):
    closed, given = fp4jax.coverage(quantised, normal(1, D, 8), X).rows
  assert not closed.quantised and "no operand comes" in closed.reason
  assert given.quantised


def test_integer_products_are_listed_with_their_reason():
  f = lambda p, x: (x @ p["w"]) + (jnp.arange(D) @ p["n"].astype(int)).sum()
  params = {"w": normal(0, D, 8), "n": normal(1, D, 8)}
  table = fp4jax.coverage(fp4jax.quantize(f, ALL), params, X)
  integer = [r for r in table.rows if "real floats" in r.reason]
  assert len(table.rows) == 2 and len(integer) == 1
  assert not integer[0].quantised


def test_abstract_arguments_and_keys_are_accepted():
  quantised = fp4jax.quantize(layer_outputs, ALL)
  shape = jax.ShapeDtypeStruct((D, 8), jnp.float32)
  x = jax.ShapeDtypeStruct((4, D), jnp.float32)
  key = jax.random.key(0)
  table = fp4jax.coverage(quantised, {"w": shape}, x, fp4_key=key)
  assert table == fp4jax.coverage(quantised, {"w": normal(0, D, 8)}, X)


def test_a_bf16_policy_lists_what_could_be_quantised():
  table = fp4jax.coverage(
    fp4jax.quantize(everything, policies.bf16()), PARAMS, X
  )
  assert not table.quantised
  assert [r.path for r in table.rows if r.reason == "default"] == [
    "a",
    "b",
    "stack",
    "stack",
    "c",
    "d",
  ]


def test_the_table_prints_each_site_and_the_sum():
  params = {
    **{f"blocks_{i}": {"up": normal(i, D, 8)} for i in range(4)},
    "head": normal(9, D, 8),
    "stack": normal(5, 3, D, 8),
  }

  def f(p, x):
    outs = layer_outputs({"head": p["head"], "stack": p["stack"]}, x)
    return outs, [x @ p[f"blocks_{i}"]["up"] for i in range(4)]

  rules = (
    Rule(path="head", recipe=None),
    Rule(path="blocks_0/**", recipe=None),
  )
  quantised = fp4jax.quantize(f, Policy(rules=rules, default=RNE))
  text = str(fp4jax.coverage(quantised, params, X))
  lines = text.splitlines()
  assert lines[0].split() == [
    "site",
    "layers",
    "lhs",
    "rhs",
    "fprop",
    "dgrad",
    "wgrad",
    "reason",
  ]
  assert "6 of 8 linear layers quantised" in lines[-2]
  assert lines[-1].startswith("backend ") and ": " in lines[-1]
  for site in ("head", "stack", "blocks_0/up", "blocks_[1-3]/up"):
    assert any(line.startswith(site) for line in lines), (site, text)
  (head,) = (line for line in lines if line.startswith("head"))
  assert "4x16" in head and "16x8" in head and '"head"' in head
  (stack,) = (line for line in lines if line.startswith("stack"))
  assert "0-2" in stack and str(RNE.fprop) in stack


def test_equal_rows_print_once():
  """Attention's own products of four blocks have no names of their own."""

  def f(p, x):
    for _ in range(4):
      x = x @ p["tied"] + (x @ x.T @ x) * 1e-3
    return x

  quantised = fp4jax.quantize(f, ALL)
  text = str(fp4jax.coverage(quantised, {"tied": normal(0, D, D)}, X))
  assert text.count("tied (4 times)") == 1 and text.count("tied") == 1
  assert text.count("(dot_general) (4 times)") == 2  # x xT, and times x
  assert "4 of 4 linear layers quantised" in text


def test_j05_a_refused_site_names_path_and_remedy():
  """Whatever cannot be quantised says which site, why, and what to write."""
  x = jnp.ones((4, D), "complex64")
  dims = (((1,), (0,)), ((), ()))
  with pytest.raises(ValueError) as error:
    fp4jax.dot(x, normal(0, D, 8), dims, recipe=RNE, site="blocks_3/mlp/up")
  text = str(error.value)
  assert "blocks_3/mlp/up" in text and "complex64" in text
  assert 'Rule(path="blocks_3/mlp/up", recipe=None)' in text
  # Sizes are never a problem: 60 inputs are padded inside.
  f = fp4jax.quantize(lambda w, x: x @ w, policies.all_linear(recipes.mxfp4()))
  out = f(jnp.ones((60, 32)), jnp.ones((8, 60)))
  np.testing.assert_allclose(out, 60.0)


def test_unsupported_backends_name_recipe_and_alternative():
  quantised = fp4jax.quantize(layer_outputs, ALL, backend="pallas")
  with pytest.raises(fp4jax.UnsupportedError, match="fp8.*backend='reference'"):
    fp4jax.coverage(quantised, {"w": normal(0, D, 8)}, X)


def test_coverage_traces_nothing_again():
  traces = []

  def f(w, x):
    traces.append(1)
    return x @ w

  quantised = fp4jax.quantize(f, ALL)
  quantised(normal(0, D, 8), X)
  fp4jax.coverage(quantised, normal(0, D, 8), X)
  assert len(traces) == 1
  with pytest.raises(ValueError, match="the function that quantize returned"):
    fp4jax.coverage(functools.partial(quantised), normal(0, D, 8), X)


def test_coverage_asks_for_the_arguments_of_a_call():
  quantised = fp4jax.quantize(layer_outputs, ALL)
  with pytest.raises(ValueError, match="^coverage: got no.*of a call"):
    fp4jax.coverage(quantised)


def test_a_bare_array_of_parameters_has_a_name():
  f = fp4jax.quantize(lambda w, x: x @ w, policies.all_linear())
  (row,) = fp4jax.coverage(f, jnp.ones((16, 16)), jnp.ones((2, 16))).rows
  assert row.path == "params" and row.quantised


def test_the_table_says_which_backend_serves_and_why():
  x = jnp.ones((32, 64))
  params = {"w": jnp.ones((64, 32))}

  def model(params, x):
    return x @ params["w"]

  for backend, words in (
    ("reference", "backend reference: it was asked for"),
    ("pallas_interpret", "backend pallas_interpret: it was asked for"),
  ):
    q = fp4jax.quantize(model, policies.all_linear(), backend=backend)
    table = fp4jax.coverage(q, params, x)
    assert str(table).splitlines()[-1] == words
    assert table.rows[0].backend.name == backend
  plain = fp4jax.quantize(model, policies.bf16())
  assert "backend" not in str(fp4jax.coverage(plain, params, x))
