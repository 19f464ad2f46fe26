"""Policies: which site follows which recipe, and what is said when none does.

Two kinds of checks. Names, globs and layers are plain Python, checked on the
decisions of ``policy.resolve`` for made-up sites. What a decision means is
checked on values: every site of a small model returns its own product, and a
site is quantised if and only if that product differs from the plain one; a site
left alone is equal bit for bit.
"""

import dataclasses
import functools
import inspect
import pickle

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
from fp4jax import globs
from fp4jax import policies
from fp4jax import policy as policy_lib
from fp4jax import recipes

RNE = recipes.fp8("fp8_e4m3")  # No key, and the cheapest to compile.
OTHER = recipes.mxfp8()


@dataclasses.dataclass(frozen=True)
class Stub:
  """What ``resolve`` reads of a site."""

  paths: tuple[str, ...]
  positions: int = 1

  @property
  def scanned(self):
    return self.positions > 1


def site(path, positions=1):
  return Stub((path,), positions)


def unrolled(*names, count=6):
  return [site(n.format(i)) for i in range(count) for n in names]


def left_alone(rules, sites, default=RNE, **kwargs):
  """{path: layers} that the policy leaves as written."""
  policy = Policy(rules=tuple(rules), default=default)
  decisions = policy_lib.resolve(policy, sites, **kwargs)
  found = {}
  for one, per in zip(sites, decisions, strict=True):
    layers = [i for i, d in enumerate(per) if not d.recipe.quantises]
    if layers:
      found[one.paths[0]] = layers if one.scanned else True
  return found


# Globs


@pytest.mark.parametrize(
  "glob, path, expected",
  [
    ("**/up/**", "params/mlp/up/kernel", True),
    ("**/up/**", "up/kernel", True),
    ("**/up/**", "params/mlp/up", True),
    ("**/up/**", "params/upper/kernel", False),
    ("**/up", "params/up/kernel", False),
    ("**", "a", True),
    ("**", "a/b/c", True),
    ("*", "a", True),
    ("*", "a/b", False),
    ("a/*/c", "a/b/c", True),
    ("a/*/c", "a/b/b/c", False),
    ("a/**/c", "a/c", True),
    ("a/**/c", "a/b/b/c", True),
    ("blocks_[0-2]/*", "blocks_1/w", True),
    ("blocks_[0-2]/*", "blocks_3/w", False),
    ("blocks_?/*", "blocks_3/w", True),
    ("blocks_?/*", "blocks_33/w", False),
    ("*/w.1", "a/wx1", False),
    ("*head*/**", "lm_head/kernel", True),
  ],
)
def test_globs(glob, path, expected):
  assert bool(globs.matches(glob, path)) == expected


def test_layer_captures_an_integer():
  match = globs.matches("**/b_{layer}/**", "params/b_12/up/kernel")
  assert match["layer"] == "12"
  assert globs.matches("**/b_{layer}/**", "params/b_x/up/kernel") is None


# Layers


SIX = unrolled("params/b_{}/w")
SIX_BLOCKS = unrolled("params/blocks_{}/w")


@pytest.mark.parametrize(
  "layers, expected",
  [
    (3, [3]),
    (-1, [5]),
    (slice(0, 2), [0, 1]),
    (slice(-2, None), [4, 5]),
    (slice(None, None, 2), [0, 2, 4]),
    ({1, -1}, [1, 5]),
    ([0, 3], [0, 3]),
    (range(2, 4), [2, 3]),
    (slice(-0.15, None), [5]),
    (slice(-0.5, None), [3, 4, 5]),
    (slice(0.0, 0.34), [0, 1, 2]),
    (None, [0, 1, 2, 3, 4, 5]),
  ],
)
def test_layers_name_the_same_blocks_unrolled_and_scanned(layers, expected):
  rule = lambda path: Rule(path=path, recipe=None, layers=layers)
  head = site("params/head/w")
  got = left_alone([rule("**/b_{layer}/**")], [*SIX, head])
  assert got == {f"params/b_{i}/w": True for i in expected}
  got = left_alone([rule("**/b/**")], [site("params/b/w", 6), head])
  assert got == {"params/b/w": expected}


def test_negative_layers_count_from_the_largest_index_of_the_pattern():
  """A hybrid stack: attention in blocks 0, 2, 4, an MLP in 1, 3, 5."""
  sites = [site(f"b_{i}/{'mlp' if i % 2 else 'attn'}/w") for i in range(6)]
  last = lambda path: left_alone(
    [Rule(path=path, layers=-1, recipe=None)], sites
  )
  assert last("b_{layer}/**") == {"b_5/mlp/w": True}
  assert last("b_{layer}/attn/**") == {"b_4/attn/w": True}


def test_a_list_inside_a_scan_counts_the_captured_index():
  sites = [site("blocks/0/w", 3), site("blocks/1/w", 3)]
  rule = Rule(path="blocks/{layer}/**", layers=1, recipe=None)
  assert left_alone([rule], sites) == {"blocks/1/w": [0, 1, 2]}


# Rules


def recipes_of(policy, sites):
  return [
    [d.recipe.name for d in per] for per in policy_lib.resolve(policy, sites)
  ]


def test_the_first_rule_that_matches_wins():
  sites = [site("a/up/w"), site("a/down/w"), site("b/w")]
  first = Rule(path="**/up/**", recipe=OTHER)
  second = Rule(path="a/**", recipe=None)
  policy = Policy(rules=(first, second), default=RNE)
  assert recipes_of(policy, sites) == [["mxfp8"], ["bf16"], ["fp8"]]
  # The other order: the first rule covers all of the second, which is a mistake
  # unless both ask for the same, or the second is optional.
  policy = Policy(rules=(second, first), default=RNE)
  with pytest.raises(
    fp4jax.PolicyError,
    match=r'"\*\*/up/\*\*" decides nothing.*"a/\*\*".*move it',
  ):
    policy_lib.resolve(policy, sites)
  for last in (
    dataclasses.replace(first, optional=True),
    dataclasses.replace(first, recipe=None),
  ):
    policy = Policy(rules=(second, last), default=RNE)
    assert recipes_of(policy, sites) == [["bf16"], ["bf16"], ["fp8"]]


def test_any_glob_of_a_tuple_and_any_parameter_of_a_site_matches():
  sites = [Stub(("lora/a", "lora/b")), site("c")]
  rule = Rule(path=("d", "*/b"), recipe=None, layers=None)
  assert list(left_alone([rule], [*sites, site("d")])) == ["lora/a", "d"]


def test_every_glob_and_every_listed_layer_of_a_rule_matches_something():
  def said(**fields):
    with pytest.raises(fp4jax.PolicyError) as error:
      left_alone([Rule(recipe=None, **fields)], [*SIX, site("head/w")], **given)
    return str(error.value)

  given = {"parameters": ["embed/table", *(s.paths[0] for s in SIX), "head/w"]}
  text = said(path=("head/**", "**/typo/**"))
  assert text.count("typo") == 1 and "head/**" not in text
  assert 'rule "**/typo/**" matches none of the model\'s 7' in text
  assert "optional=True" in text
  text = said(path="**/b_{layer}/**", layers=[0, 6, -1])
  assert "layers=6 names none of the layers 0 to 5 of params/b_0/w" in text
  text = said(path="**/b_{layer}/**", layers={-7, 0}, name="mine")
  assert "rule mine (layers=-7) names none of the layers 0 to 5" in text
  text = said(path=("**/b_{layer}/**", "head/**"), layers=[0])
  assert '"head/**" layers={0} matches head/w, which has no layer' in text
  # The other ways to say it, and a parameter that no GEMM reads.
  for fields in (
    {"path": ("head/**", "**/typo/**"), "optional": True},
    {"path": ("head/**", "**/typo/**"), "every": False},
    {"path": ("head/**", "embed/**")},
  ):
    rule = Rule(recipe=None, **fields)
    assert left_alone([rule], [*SIX, site("head/w")], **given) == {
      "head/w": True
    }
  rule = Rule(path="b", recipe=None, layers=[0, 9], every=False)
  assert left_alone([rule], [site("b", 6)]) == {"b": [0]}
  # Of several stacks any may be long enough.
  stacks = unrolled("e/layers_{}/w", count=2) + unrolled("d/layers_{}/w")
  rule = Rule(path="**/layers_{layer}/**", recipe=None, layers=[0, 4])
  assert len(left_alone([rule], stacks)) == 3
  # A hybrid stack has no attention in block 1.
  hybrid = [site("b_0/attn"), site("b_1/mlp"), site("b_2/attn")]
  rule = Rule(path="b_{layer}/attn", recipe=None, layers=[0, 1])
  with pytest.raises(fp4jax.PolicyError, match="layers=1 names none"):
    left_alone([rule], hybrid)


def test_presets_take_any_of_their_usual_names_and_every_one_of_the_users():
  sites = [*SIX_BLOCKS, site("params/out/w")]
  make = functools.partial(policies.nemotron, 1, 1, recipe=RNE)
  both = make(heads=(*policies.HEADS, "**/out/**"))
  assert not policy_lib.resolve(both, sites)[-1][0].recipe.quantises
  with pytest.raises(fp4jax.PolicyError, match=r'typo/\*\*"\).*with heads='):
    policy_lib.resolve(make(heads=("**/out/**", "**/typo/**")), sites)


def test_gemms_restrict_a_rule_and_leave_the_rest_to_later_rules():
  rules = (
    Rule(path="**", gemms=("wgrad",), recipe=None),
    Rule(path="a/**", gemms=("wgrad", "dgrad"), recipe=OTHER),
  )
  policy = Policy(rules=rules, default=RNE)
  (a,), (b,) = policy_lib.resolve(policy, [site("a/w"), site("b/w")])
  assert a.recipe.wgrad is None and b.recipe.wgrad is None
  assert a.recipe.dgrad == OTHER.dgrad and b.recipe.dgrad == RNE.dgrad
  assert a.recipe.fprop == RNE.fprop and b.recipe.fprop == RNE.fprop
  assert "wgrad" in a.reasons[2] and a.reasons[0] == "default"


def test_no_default_leaves_alone_what_no_rule_names():
  policy = Policy(rules=(Rule(path="a/**", recipe=RNE),))
  assert recipes_of(policy, [site("a/w"), site("b/w")]) == [["fp8"], ["bf16"]]


# Values


def one_each(params, x):
  """Every parameter's own product, at its own path."""
  return jax.tree.map(lambda w: x @ w, params)


def scanned(params, x):
  """The same with the blocks scanned, one product a layer."""
  outs = {k: x @ v for k, v in params.items() if k != "blocks"}
  body = lambda _, w: (None, one_each(w, x))
  outs["blocks"] = lax.scan(body, None, params["blocks"])[1]
  return outs


def weights(*lead):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.standard_normal((*lead, 16, 8)), jnp.float32)


def quantised_paths(policy, params, model=one_each):
  """Paths (and layers of stacks) whose product is not the plain one's bits."""
  x = weights().T
  got = jax.jit(fp4jax.quantize(model, policy))(params, x)
  plain = jax.jit(model)(params, x)
  found = {}
  pairs = jax.tree_util.tree_flatten_with_path(got)[0]
  for (path, a), b in zip(pairs, jax.tree.leaves(plain), strict=True):
    name = "/".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path)
    if a.ndim == 3:
      found[name] = [i for i in range(len(a)) if (a[i] != b[i]).any()]
    else:
      found[name] = bool((a != b).any())
  return found


def test_nemotron_on_an_unrolled_model():
  params = {
    **{f"blocks_{i}": {"up": {"kernel": weights()}} for i in range(12)},
    "lm_head": {"kernel": weights()},
    "embed": weights(),
  }
  got = quantised_paths(policies.nemotron(2, 8, recipe=RNE), params)
  assert [k for k, v in got.items() if v] == [
    "blocks_2/up/kernel",
    "blocks_3/up/kernel",
  ]


def test_nemotron_and_last_fraction_on_a_scanned_model():
  params = {"blocks": {"up": weights(12)}, "head": weights()}
  got = quantised_paths(policies.nemotron(2, 8, recipe=RNE), params, scanned)
  assert got == {"blocks/up": [2, 3], "head": False}
  # 15 % of 12 is 1.8, rounded up: two.
  got = quantised_paths(
    policies.last_fraction(0.15, recipe=RNE), params, scanned
  )
  assert got == {"blocks/up": list(range(10)), "head": False}


def test_nemotron_on_nnx_names():
  """layers/0/attn/query/kernel: a list of modules, no names but the paths."""

  class Block(nnx.Module):
    def __init__(self, rngs):
      self.up = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.layers = nnx.List([Block(rngs) for _ in range(5)])
      self.lm_head = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
      return [b.up(x) for b in self.layers], self.lm_head(x)

  model, x = Model(nnx.Rngs(0)), weights().T
  policy = policies.nemotron(1, 2, recipe=RNE)
  outs, head = fp4jax.quantize(lambda m, x: m(x), policy)(model, x)
  plain, plain_head = model(x)
  changed = [bool((a != b).any()) for a, b in zip(outs, plain, strict=True)]
  assert changed == [False, True, True, False, False]
  np.testing.assert_array_equal(head, plain_head)


@pytest.mark.parametrize(
  "names",
  [
    "params/blocks_{}/attn/query/kernel",
    "params/layers_{}/mlp/up/kernel",
    "params/transformer/h_{}/mlp/c_fc/kernel",
    "params/encoderblock_{}/Dense_0/kernel",
    "layers/{}/mlp/up/kernel",
    "model/blocks/{}/w",
    "h/{}/attn/kernel",
    "params/TransformerBlock_{}/Dense_0/kernel",
  ],
)
def test_presets_know_usual_names_of_blocks(names):
  head = site("params/lm_head/kernel")
  sites = [*unrolled(names, count=5), head]
  policy = policies.nemotron(1, 1, recipe=RNE)
  got = [per[0].recipe.quantises for per in policy_lib.resolve(policy, sites)]
  assert got == [False, True, True, True, False, False]


@pytest.mark.parametrize(
  "name",
  ["params/blocks/up/kernel", "params/layers/up/kernel", "params/h/c_fc/w"],
)
def test_presets_know_usual_names_of_stacks(name):
  policy = policies.nemotron(1, 2, recipe=RNE, heads=())
  (per,) = policy_lib.resolve(policy, [site(name, 6)])
  assert [d.recipe.quantises for d in per] == [0, 1, 1, 1, 0, 0]


def test_presets_have_defaults_and_check_their_arguments():
  assert policies.all_linear().default == recipes.nvfp4()
  assert policies.nemotron().default == recipes.nvfp4()
  assert not policies.bf16().quantises
  for make in (policies.all_linear, policies.nemotron, policies.last_fraction):
    default = inspect.signature(make).parameters["recipe"].default
    assert default == recipes.nvfp4()
    with pytest.raises(ValueError) as error:
      make(recipe=None)
    assert str(error.value) == (
      f"{make.__name__}: recipe=None; pass recipes.nvfp4(), or policies.bf16()"
      " to leave all layers as written."
    )
  assert policies.nemotron(heads=[]) == policies.nemotron(heads=())
  with pytest.raises(TypeError, match="head"):
    policies.nemotron(head=())
  with pytest.raises(ValueError, match="first=-1.*0 or more"):
    policies.nemotron(first=-1)
  # 1.0 would be a fraction: all blocks.
  for bad in ("1", 1.0, None, True, recipes.nvfp4()):
    with pytest.raises(ValueError, match="nemotron: last=.*an int of 0"):
      policies.nemotron(last=bad)
  for bad in (1.0, -0.1, "0.1"):
    with pytest.raises(ValueError, match="at least 0, below 1"):
      policies.last_fraction(bad)


def test_gemms_rules_change_that_gemm_alone():
  """Each of y, dx, dw: the plain bits where its GEMM is left alone."""

  def three(f):
    def run(w, x, g):
      y, vjp = jax.vjp(f, w, x)
      dw, dx = vjp(g)
      return y, dx, dw

    return jax.jit(run)(weights(), weights().T, g)

  g = weights()[:8, :8]
  model = lambda w, x: x @ w
  plain = three(model)
  for i, gemm in enumerate(recipes.GEMMS):
    policy = Policy(rules=(Rule(path="**", gemms=(gemm,), recipe=RNE),))
    got = three(fp4jax.quantize(model, policy))
    changed = [bool((a != b).any()) for a, b in zip(got, plain, strict=True)]
    assert changed == [j == i for j in range(3)], gemm


def test_a_site_at_the_root_has_the_empty_path_and_a_policy_reaches_it():
  x, w = weights().T, weights()
  policy = Policy(rules=(Rule(path="**", recipe=RNE),))
  got = fp4jax.quantize(lambda w, x: x @ w, policy)(w, x)
  assert (got != x @ w).any()


# What does not fit


def test_j01_an_unused_rule_names_its_pattern_and_real_layers():
  sites = unrolled("params/blocks_{}/ffn/up/kernel", "params/b_{}/attn/q")
  rule = Rule(path="**/mlp/typo/**", recipe=None)
  with pytest.raises(fp4jax.PolicyError) as error:
    left_alone([rule], sites)
  text = str(error.value)
  assert "**/mlp/typo/**" in text and "optional=True" in text
  assert any(s.paths[0] in text for s in sites)
  # The nearest names come first.
  with pytest.raises(fp4jax.PolicyError, match="params/blocks_0/ffn/up/kernel"):
    left_alone([Rule(path="**/fnn/**", recipe=None)], sites)


def test_j01_through_quantize():
  params = {"ffn": {"kernel": weights()}}
  policy = Policy(rules=(Rule(path="**/mlp/**", recipe=None),), default=RNE)
  with pytest.raises(fp4jax.PolicyError, match=r"\*\*/mlp/\*\*.*ffn/kernel"):
    fp4jax.quantize(one_each, policy)(params, weights().T)
  optional = dataclasses.replace(policy.rules[0], optional=True)
  got = quantised_paths(dataclasses.replace(policy, rules=(optional,)), params)
  assert got == {"ffn/kernel": True}


def test_a_glob_is_shown_once_and_one_in_another_language_is_explained():
  hint = "only {layer} is a placeholder; parts are separated by /"
  for glob, foreign in (
    ("**/mpl/**", False),
    ("**/c_{layer}/**", False),
    ("**/w.1/**", False),
    ("**/b_{i}/**", True),
    (r"params/b_.*", True),
    ("params.b_0.w", True),
  ):
    with pytest.raises(fp4jax.PolicyError) as error:
      left_alone([Rule(path=glob, recipe=None)], SIX)
    assert str(error.value).count(glob) == 1
    assert (hint in str(error.value)) == foreign, glob
  with pytest.raises(fp4jax.PolicyError, match=r'rule mine \("c/\*\*"\) match'):
    left_alone([Rule(path="c/**", recipe=None, name="mine")], SIX)


def test_unused_layers_say_which_there_are():
  rule = Rule(path="**/b_{layer}/**", layers=9, recipe=None)
  with pytest.raises(fp4jax.PolicyError, match="layers 0 to 5.*layers="):
    left_alone([rule], SIX)


def test_layers_without_an_index_explain_the_two_ways():
  rule = Rule(path="**/w", layers=0, recipe=None)
  with pytest.raises(fp4jax.PolicyError, match=r"\{layer\}.*scan"):
    left_alone([rule], [site("params/w")])


def test_a_policy_that_quantises_nothing_says_why():
  rule = Rule(path="**", recipe=None)
  with pytest.raises(
    fp4jax.PolicyError, match=r"quantises nothing.*params/b_0"
  ):
    left_alone([rule], SIX)
  with pytest.raises(fp4jax.PolicyError, match="first argument"):
    left_alone([], [])
  with pytest.raises(fp4jax.PolicyError, match="params_argnums"):
    fp4jax.quantize(lambda p, x: x @ weights(), policies.all_linear())(
      {}, weights().T
    )
  # A policy that asks for nothing is no mistake.
  assert left_alone([], SIX, default=None)
  assert left_alone([rule], SIX, default=recipes.bf16())


@pytest.mark.parametrize("first, last", [(2, 4), (2, 8), (9, 0)])
def test_presets_that_leave_all_blocks_alone_say_how_many_there_are(
  first, last
):
  for sites in (SIX_BLOCKS, [site("params/blocks/w", 6)]):
    with pytest.raises(fp4jax.PolicyError) as error:
      policy_lib.resolve(
        policies.nemotron(first, last, recipe=RNE, heads=()), sites
      )
    text = str(error.value)
    assert "the model has 6 blocks" in text
    assert "lower first or last of policies.nemotron" in text
    assert f"first {first} blocks" in text
    assert "leave all 6 linear layers alone" in text
  policy_lib.resolve(policies.nemotron(2, 3, recipe=RNE, heads=()), SIX_BLOCKS)


def test_a_preset_without_its_blocks_names_its_own_argument():
  sites = [site("params/stage_0/w"), site("params/stage_1/w")]
  make = functools.partial(policies.nemotron, 1, 0, recipe=RNE, heads=())
  with pytest.raises(fp4jax.PolicyError) as error:
    policy_lib.resolve(make(), sites)
  text = str(error.value)
  assert "stage_0/w" in text and "blocks= of the preset" in text
  assert "optional" not in text
  # Without the slashes: the error says what was passed, and what would do.
  with pytest.raises(fp4jax.PolicyError) as error:
    policy_lib.resolve(make(blocks="stage_{layer}"), sites)
  assert 'first block ("stage_{layer}")' in str(error.value)
  assert 'did you mean "**/stage_{layer}/**"?' in str(error.value)
  policy_lib.resolve(make(blocks="**/stage_{layer}/**"), sites)


def test_a_head_that_no_glob_matches_is_an_error():
  """By the usual names or by the user's own: never quantised in silence."""
  sites = [*SIX_BLOCKS, site("params/Dense_0/kernel")]
  embedding = ["params/embed/embedding"]  # which no GEMM reads
  for make in (policies.nemotron, policies.last_fraction):
    first = {"first": 1, "last": 1} if make is policies.nemotron else {}
    with pytest.raises(fp4jax.PolicyError) as error:
      policy_lib.resolve(make(recipe=RNE, **first), sites, embedding)
    text = str(error.value)
    assert "embeddings and heads matches none of the model's 7" in text
    assert "heads=()" in text and "did you mean" not in text
    for bad in ("Dense_0", "**/Dense_0", ("**/logit/**",)):
      policy = make(recipe=RNE, heads=bad, **first)
      with pytest.raises(fp4jax.PolicyError, match="with heads= of the preset"):
        policy_lib.resolve(policy, sites)
    policy = make(recipe=RNE, heads="Dense_0", **first)
    with pytest.raises(fp4jax.PolicyError, match=r'mean "\*\*/Dense_0/\*\*"'):
      policy_lib.resolve(policy, sites)
    policy = make(recipe=RNE, heads="**/Dense_0/**", **first)
    assert not policy_lib.resolve(policy, sites)[-1][0].recipe.quantises
    policy = make(recipe=RNE, heads=(), **first)
    assert policy_lib.resolve(policy, sites)[-1][0].recipe.quantises


def test_every_stack_has_its_own_first_and_last_blocks():
  """Encoder and decoder, unrolled, as lists, scanned, or one of each."""
  policy = policies.nemotron(1, 1, recipe=RNE, heads=())

  def kept(*stacks):
    sites = [s for stack in stacks for s in stack]
    found = policy_lib.resolve(policy, sites)
    flat = [d.recipe.quantises for per in found for d in per]
    return [i for i, quantised in enumerate(flat) if not quantised]

  encoder = unrolled("params/encoder/layers_{}/w", count=3)
  decoder = unrolled("params/decoder/layers_{}/w", count=6)
  assert kept(encoder, decoder) == [0, 2, 3, 8]
  assert kept(unrolled("enc/layers/{}/w", count=3), decoder) == [0, 2, 3, 8]
  scanned = [site("enc/blocks/w", 3)], [site("dec/blocks/w", 6)]
  assert kept(*scanned) == [0, 2, 3, 8]
  assert kept(scanned[0], decoder) == [0, 2, 3, 8]
  # Blocks of two kinds under one parent are one stack.
  hybrid = [site(f"params/{k}_layer_{i}/w") for i, k in enumerate("mammam")]
  assert kept(hybrid) == [0, 5]
  # So are fractions.
  half = Rule(path="**/layers_{layer}/**", layers=slice(0.5, None), recipe=None)
  assert list(left_alone([half], [*encoder, *decoder])) == [
    "params/encoder/layers_2/w",
    *(f"params/decoder/layers_{i}/w" for i in (3, 4, 5)),
  ]


def test_the_real_reason_why_nothing_can_be_quantised():
  """Not that parameters are missing, where they are not."""
  policy, w, x = policies.all_linear(RNE), weights(), weights().T
  integers = fp4jax.quantize(lambda w, x: x @ w, policy)
  with pytest.raises(fp4jax.PolicyError) as error:
    integers(w, x.astype(jnp.int32))
  text = str(error.value)
  assert "params: operands are int32 and float32" in text and "cast" in text
  assert "params_argnums" not in text
  # Codes that the model decodes itself.
  codes = {"up": {"codes": w.astype(jnp.int8)}}
  decodes = lambda p, x: x @ p["up"]["codes"].astype(x.dtype)
  with pytest.raises(fp4jax.PolicyError, match="up/codes is int8.*as floats"):
    fp4jax.quantize(decodes, policy)(codes, x)
  quantised = fp4jax.quantize(lambda w, x: x @ w, policy)
  nested = fp4jax.quantize(lambda w, x: quantised(w, x), policy)
  with pytest.raises(fp4jax.PolicyError, match="inside custom_vjp") as error:
    nested(w, x)
  assert "fp4jax.quantize rewrote" in str(error.value)
  assert "params_argnums" not in str(error.value)


def test_a_rule_for_parameters_that_no_gemm_reads_is_no_mistake():
  rule = Rule(path="**/embed/**", recipe=None)
  assert not left_alone([rule], SIX, parameters=["params/embed/table"])
  with pytest.raises(fp4jax.PolicyError, match="embed"):
    left_alone(
      [dataclasses.replace(rule, recipe=RNE)],
      SIX,
      parameters=["params/embed/table"],
    )
  table, w = weights().T, weights()
  model = lambda p, i: p["embed"]["table"][i] @ p["w"]
  policy = Policy(rules=(Rule(path="embed/**", recipe=None),), default=RNE)
  params = {"embed": {"table": table}, "w": w}
  ids = jnp.array([0, 3, 1])
  got = fp4jax.quantize(model, policy)(params, ids)
  assert (got != model(params, ids)).any()


# Plain data


def test_c13_equal_policies_share_one_trace():
  """Policies are static arguments: two equal ones, one trace."""
  traces = []

  @functools.partial(jax.jit, static_argnums=0)
  def step(policy, w, x):
    traces.append(policy)
    return fp4jax.quantize(lambda w, x: x @ w, policy)(w, x)

  w, x = weights(), weights().T
  make = lambda last: policies.nemotron(0, last, recipe=RNE, blocks="a/{layer}")
  build = lambda **kwargs: Policy(
    rules=(
      Rule(path=["a/**", "b"], layers=slice(0, 2), recipe=None, optional=True),
    ),
    default=dataclasses.replace(RNE, **kwargs),
  )
  assert build() == build() and hash(build()) == hash(build())
  assert make(1) == make(1) and hash(make(1)) == hash(make(1))
  assert make(1) != make(2)
  step(build(), w, x)
  step(build(), w, x)
  assert len(traces) == 1
  other = build(wgrad=None)
  assert other != build()
  step(other, w, x)
  assert len(traces) == 2


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8", "bf16"])
def test_recipes_are_values(name):
  make = getattr(recipes, name)
  assert make() == make() and hash(make()) == hash(make())
  text = repr(make())
  scope = {
    "Recipe": Recipe,
    "Gemm": Gemm,
    "Operand": Operand,
    "Rht": fp4jax.Rht,
  }
  assert eval(text, scope) == make()


def test_policies_print_and_are_rebuilt_from_their_print():
  policy = policies.nemotron(2, 8)
  scope = {
    "Policy": Policy,
    "Rule": Rule,
    "Recipe": Recipe,
    "Gemm": Gemm,
    "Operand": Operand,
    "Rht": fp4jax.Rht,
  }
  assert eval(repr(policy), scope) == policy
  text = str(Rule(path="a/**", layers=slice(-8, None), recipe=None))
  assert text == '"a/**" layers=[-8:]'
  assert "layers={0, 3}" in str(Rule(path="a", layers={3, 0}, recipe=None))
  assert "gemms=wgrad" in str(Rule(path="a", gemms=["wgrad"], recipe=None))
  assert str(policies.nemotron(1, 2)) == (
    "embeddings and heads → as written; first block → as written;"
    " last 2 blocks → as written; default → nvfp4"
  )


@pytest.mark.parametrize(
  "make, match",
  [
    (lambda: Rule(path="", recipe=None), r"Rule: path=''.*glob"),
    (lambda: Rule(path=(), recipe=None), r"Rule: path=\(\).*glob"),
    (lambda: Rule(path="a", recipe="nvfp4"), r"'nvfp4'.*recipes.nvfp4\(\)"),
    (lambda: Rule(path="a", recipe=recipes.nvfp4), r"recipes.nvfp4\(\)"),
    (lambda: Rule(path="a", recipe=None, layers="0"), "layers='0'; use"),
    (lambda: Rule(path="a", recipe=None, layers=0.5), "layers=0.5; use"),
    (lambda: Rule(path="a", recipe=None, layers=True), "layers=True; use"),
    (lambda: Rule(path="a", recipe=None, layers=[0, True]), "True]; use an"),
    (lambda: Rule(path="a", recipe=None, layers=[1.0]), "1.0]; use an int"),
    (lambda: Rule(path="a", recipe=None, layers=[[0]]), "0]]; use an int"),
    (lambda: Rule(path="a", recipe=None, layers=slice("0")), "'0'.*use an int"),
    (lambda: Rule(path="a", recipe=None, gemms=("up",)), "fprop, dgrad"),
    (lambda: Rule(path="a", recipe=None, gemms=()), "fprop, dgrad"),
    (lambda: Rule(path=None, recipe=None), r"Rule: path=None.*glob"),
    (lambda: Rule("**", None), r"Rule: got '\*\*' without.*Rule\(path=\.\.\."),
    (lambda: Rule(path="a", recipe=None, layers=["0"]), "'0'.*set of ints"),
    (lambda: Rule(path="a", recipe=None, gemms="wgrad"), "'wgrad'; use a tup"),
    (lambda: Policy(RNE), r"without a name.*Policy\(rules=\.\.\., default"),
    (
      lambda: Policy(rules=Rule(path="a", recipe=None)),
      r"Policy: rules=Rule.* is no tuple; write rules=\(Rule\(",
    ),
    (lambda: Policy(rules=None), "rules=None is no tuple"),
    (lambda: Policy(rules=("a",)), "'a' is no Rule; write Rule"),
    (lambda: Policy(default="nvfp4"), r"'nvfp4'.*recipes.nvfp4\(\)"),
    (lambda: Policy(default=policies.bf16()), "is no Recipe"),
    (
      lambda: Policy(rules=(Rule(path="a", recipe=None),)),
      "every rule leaves.*give default=",
    ),
    (lambda: policies.nemotron(heads=None), r"heads=None.*heads=\(\) where"),
    (lambda: policies.nemotron(blocks=()), r"blocks=\(\) holds no pattern"),
    (lambda: Operand(rht=True), r"rht=True is no Rht; pass Rht\(\)"),
    (lambda: Operand(rht=16), r"rht=16 is no Rht; pass Rht\(\)"),
    (lambda: Operand(rht="hadamard"), r"'hadamard' is no Rht; pass Rht\(\)"),
    (lambda: Operand(format=["nvfp4"]), "is not known; use one of"),
    (lambda: Operand(format="fp8_e4m3", block=16), "block=16 is no pair"),
    (lambda: Operand(scale_guard="16/17"), "'16/17' is outside"),
    (lambda: Operand(four_over_six="yes"), "'yes'; use True or False"),
    (lambda: Gemm(lhs=None, rhs=Operand()), r"lhs=None is no Operand; pass"),
    (lambda: Gemm(lhs=Operand(), rhs="nvfp4"), "rhs='nvfp4' is no Operand"),
  ],
)
def test_invalid_fields_say_what_to_write(make, match):
  with pytest.raises(ValueError, match=match):
    make()


def test_an_error_shows_the_beginning_and_the_end_of_a_long_value():
  with pytest.raises(ValueError) as error:
    Policy(default=policies.nemotron())
  assert len(str(error.value)) < 200


def test_keyword_fields_keep_their_signature_and_copy():
  names = ["path", "recipe", "layers", "gemms", "optional", "every", "name"]
  names.append("argument")
  assert list(inspect.signature(Rule).parameters) == names
  policy = policies.nemotron()
  assert pickle.loads(pickle.dumps(policy)) == policy


def test_an_invalid_glob_is_named():
  rule = Rule(path="a_{layer}/b_{layer}", recipe=None)
  with pytest.raises(ValueError, match=r"a_\{layer\}.*no valid pattern"):
    left_alone([rule], SIX)


class _Site:
  """A linear layer outside of any stack."""

  scanned, positions = False, 1

  def __init__(self, path):
    self.paths = (path,)


def test_presets_do_not_take_a_norm_for_a_block():
  """``LayerNorm_0`` is no GEMM: blocks that match it alone are no blocks."""
  sites = [_Site(f"cell_{i}/up/kernel") for i in range(4)]
  parameters = [f"cell_{i}/LayerNorm_0/scale" for i in range(4)]
  with pytest.raises(fp4jax.PolicyError, match="first block"):
    policy_lib.resolve(policies.nemotron(1, 1, heads=()), sites, parameters)


def test_presets_know_numbered_blocks_and_not_attention_heads():
  sites = [
    _Site(f"block{i}/multi_head_attention/query/kernel") for i in range(4)
  ]
  decisions = policy_lib.resolve(policies.nemotron(1, 1, heads=()), sites)
  quantised = [d[0].recipe.quantises for d in decisions]
  assert quantised == [False, True, True, False]
