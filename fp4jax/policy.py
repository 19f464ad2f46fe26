"""Policies: which recipe each site follows, by name and by layer.

A policy is an ordered tuple of rules over the paths of the weights; the first
rule that matches decides. ``resolve`` turns a policy and the sites that a model
has into one recipe a site and layer, and refuses policies that do not fit.
"""

import collections
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math

from fp4jax import errors
from fp4jax import globs
from fp4jax import recipes

Layers = int | slice | frozenset[int] | None
_LISTS = (set, frozenset, list, tuple, range)


def _by_name[T](cls: type[T]) -> type[T]:
  """Refuses positional arguments of a dataclass in words."""
  fill = cls.__init__

  @functools.wraps(fill)
  def __init__(self, *args, **fields):
    if args:
      names = [field.name for field in dataclasses.fields(self)]
      raise ValueError(
        f"{cls.__name__}: got {errors.shown(args[0])} without a name, needed"
        f" keyword arguments; write {cls.__name__}({names[0]}=...,"
        f" {names[1]}=...)."
      )
    fill(self, **fields)

  cls.__init__ = __init__  # type: ignore[method-assign]
  return cls


@_by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """One line of a policy.

  Attributes:
    path: a glob over the weight's path, or a tuple of globs, each for a part
      of what the rule names: ``*`` within a component, ``**`` over components,
      ``[0-2]``, and ``{layer}``, which captures an integer.
    recipe: the recipe of matching sites; None leaves them as the model wrote
      them.
    layers: restricts the rule to layer indices: an int, a slice, or a set of
      ints. Indices are what ``{layer}`` captured or, without ``{layer}``, the
      position in the scan that consumes the weight (nested scans count in
      execution order). Every stack counts by itself: a scan, or the sites that
      the path matches under one parent ("encoder" of "encoder/layers_3/up",
      "encoder/layers" of "encoder/layers/3/up"). Negative indices count from
      its largest index; a slice's float bounds are fractions of its number of
      layers, rounded away from zero.
    gemms: restricts the rule to some of "fprop", "dgrad", "wgrad"; the others
      are decided by the rules after it.
    optional: whether the rule may match nothing.
    every: whether each glob and each listed layer has to match something (the
      default), or any of them: for lists of usual names.
    name: what tables and errors call the rule, instead of its path.
    argument: which argument of a preset gave the path, for errors. Such a rule
      has to match a linear layer.
  """

  path: str | tuple[str, ...]
  recipe: recipes.Recipe | None
  layers: Layers = None
  gemms: tuple[str, ...] | None = None
  optional: bool = False
  every: bool = True
  name: str = ""
  argument: str = ""

  def __post_init__(self):
    several = isinstance(self.path, Iterable) and not isinstance(self.path, str)
    paths = tuple(self.path) if several else (self.path,)
    if not paths or not all(isinstance(p, str) and p for p in paths):
      given = f"Rule: path={errors.shown(self.path)}"
      if self.argument:
        given = f"preset: {self.argument}={errors.shown(self.path)}"
      none = ", or heads=() where there are none"
      raise ValueError(
        f'{given} holds no pattern; use a glob such as "**/mlp/**"'
        f"{none if self.argument == 'heads' else ''}."
      )
    object.__setattr__(
      self, "path", self.path if isinstance(self.path, str) else paths
    )
    if self.recipe is not None and not isinstance(self.recipe, recipes.Recipe):
      raise ValueError(
        f"Rule: recipe={errors.shown(self.recipe)} is no Recipe; call one of"
        " fp4jax.recipes, as in recipe=fp4jax.recipes.nvfp4(), or None."
      )
    if not _are_layers(self.layers):
      raise ValueError(
        f"Rule: layers={errors.shown(self.layers)}; use an int, a slice or a"
        " set of ints."
      )
    if isinstance(self.layers, _LISTS):
      object.__setattr__(self, "layers", frozenset(self.layers))
    if self.gemms is not None:
      gemms = () if isinstance(self.gemms, str) else tuple(self.gemms)
      if not gemms or any(gemm not in recipes.GEMMS for gemm in gemms):
        raise ValueError(
          f"Rule: gemms={errors.shown(self.gemms)}; use a tuple of some of"
          f" {', '.join(recipes.GEMMS)}."
        )
      object.__setattr__(self, "gemms", gemms)

  @property
  def paths(self) -> tuple[str, ...]:
    """The globs of the rule."""
    return (self.path,) if isinstance(self.path, str) else self.path

  def __str__(self):
    if self.name:
      return self.name
    text = f'"{self.paths[0]}"' + (", …" if len(self.paths) > 1 else "")
    if self.layers is not None:
      text += f" layers={_layers_text(self.layers)}"
    if self.gemms is not None:
      text += f" gemms={','.join(self.gemms)}"
    return text


@_by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
  """Ordered rules, and the recipe of what no rule matches.

  Attributes:
    rules: the first that matches a site's path (and layer, and GEMM) decides.
    default: the recipe of every other site; None leaves those as written.

  >>> policy = Policy(
  ...     rules=(Rule(path="**/lm_head/**", recipe=None),),
  ...     default=recipes.nvfp4(),
  ... )
  >>> policy == dataclasses.replace(policy), hash(policy) == hash(policy)
  (True, True)
  """

  rules: tuple[Rule, ...] = ()
  default: recipes.Recipe | None = None

  def __post_init__(self):
    if not isinstance(self.rules, Iterable):
      raise ValueError(
        f"Policy: rules={errors.shown(self.rules)} is no tuple; write"
        " rules=(Rule(path=..., recipe=...),)."
      )
    object.__setattr__(self, "rules", tuple(self.rules))
    for rule in self.rules:
      if not isinstance(rule, Rule):
        raise ValueError(
          f"Policy: {errors.shown(rule)} is no Rule; write Rule(path=...,"
          " recipe=...)."
        )
    if self.default is not None and not isinstance(
      self.default, recipes.Recipe
    ):
      raise ValueError(
        f"Policy: default={errors.shown(self.default)} is no Recipe; call one"
        " of fp4jax.recipes, as in default=fp4jax.recipes.nvfp4(), or None."
      )
    asked = {rule.recipe for rule in self.rules} | {self.default}
    if self.rules and asked == {None}:
      raise ValueError(
        "Policy: every rule leaves its sites as written and so does default;"
        " give default=, as in default=fp4jax.recipes.nvfp4(), or no rules."
      )

  @property
  def quantises(self) -> bool:
    """Whether any rule or the default asks for quantisation."""
    asked = [rule.recipe for rule in self.rules] + [self.default]
    return any(recipe is not None and recipe.quantises for recipe in asked)

  def __str__(self):
    """Every rule and its recipe, in a line."""
    asked = [(str(rule), rule.recipe) for rule in self.rules]
    return "; ".join(
      f"{rule} → {recipe.name if recipe else 'as written'}"
      for rule, recipe in [*asked, ("default", self.default)]
    )


def _are_layers(layers) -> bool:
  """Whether a value is of the type ``Layers``: True is no layer."""
  if isinstance(layers, slice):
    bounds = (layers.start, layers.stop)
    whole = layers.step is None or errors.is_integer(layers.step)
    return whole and all(
      bound is None or isinstance(bound, float) or errors.is_integer(bound)
      for bound in bounds
    )
  if isinstance(layers, _LISTS):
    return all(map(errors.is_integer, layers))
  return layers is None or errors.is_integer(layers)


@dataclasses.dataclass(frozen=True)
class Decision:
  """The recipe of one site and layer, and which rule decided each GEMM."""

  recipe: recipes.Recipe
  reasons: tuple[str, str, str]


_LEFT = recipes.bf16()


def _layers_text(layers: Layers) -> str:
  if isinstance(layers, slice):
    bounds = [layers.start, layers.stop] + ([layers.step] * bool(layers.step))
    return "[" + ":".join("" if b is None else str(b) for b in bounds) + "]"
  if isinstance(layers, frozenset):
    return "{" + ", ".join(map(str, sorted(layers))) + "}"
  return str(layers)


def _selected(layers: Layers, count: int) -> frozenset[int]:
  """The indices in range(count) that ``layers`` names."""

  def whole(bound):
    if not isinstance(bound, float):
      return bound
    return int(math.copysign(math.ceil(abs(bound) * count - 1e-9), bound))

  indices = range(count)
  if layers is None:
    return frozenset(indices)
  if isinstance(layers, slice):
    # A bound of "-0 layers" means the end, not the beginning.
    start, stop = whole(layers.start), whole(layers.stop)
    if start == 0 and isinstance(layers.start, float) and layers.start < 0:
      start = count
    return frozenset(indices[start : stop : layers.step])
  wanted = layers if isinstance(layers, frozenset) else {layers}
  return frozenset(i % count for i in wanted if -count <= i < count)


def _layer_indices(rule: Rule, site) -> list[tuple] | None:
  """The stack and layer of a site's positions; None without a match."""
  for glob in rule.paths:
    for path in site.paths:
      match = globs.matches(glob, path)
      if match is None:
        continue
      if match.groupdict().get("layer") is not None:
        parent = path[: match.start("layer")].rpartition("/")[0]
        return [(parent, int(match["layer"]))] * site.positions
      if site.scanned:
        return [(site.positions, i) for i in range(site.positions)]
      if rule.layers is None:
        return [_NO_LAYER] * site.positions
  return None


_NO_LAYER = (None, None)


def _stacks(indices) -> dict:
  """The number of layers of each stack."""
  counts: dict = {}
  for stack, index in itertools.chain.from_iterable(filter(None, indices)):
    if index is not None:
      counts[stack] = max(counts.get(stack, 0), index + 1)
  return counts


def resolve(
  policy: Policy,
  sites: Sequence,
  parameters: Sequence[str] = (),
  others: Sequence = (),
  unfit: Sequence[tuple[str, str]] = (),
) -> list[list[Decision]]:
  """One decision for each site and each position in the scans around it.

  Args:
    policy: the policy.
    sites: objects with ``paths`` (of the weights), ``scanned`` and
      ``positions`` (layers of a scanned stack, else 1).
    parameters: paths of all parameters: a rule that leaves parameters alone
      which no GEMM reads is no mistake.
    others: the contractions that cannot be quantised, with ``reason``, for
      errors.
    unfit: paths and dtypes of parameters that are no floats, for errors.

  Returns:
    A list for each site with a ``Decision`` for each position.

  Raises:
    PolicyError: a rule, or a part of it, matches nothing, or nothing at all is
      quantised.
  """
  chosen: list[list[dict]] = [[{} for _ in range(s.positions)] for s in sites]
  layers = 0
  for rule in policy.rules:
    indices = [_layer_indices(rule, site) for site in sites]
    stacks = _stacks(indices)
    if rule.layers is not None:
      layers = max([layers, *stacks.values()])
    selected = {k: _selected(rule.layers, n) for k, n in stacks.items()}
    used, overruled = False, set()
    for site, per in zip(chosen, indices, strict=True):
      for gemms, (stack, index) in zip(site, per or (), strict=per is not None):
        if rule.layers is not None and index not in selected.get(stack, ()):
          continue
        for gemm in rule.gemms or recipes.GEMMS:
          first = gemms.setdefault(gemm, rule)
          used |= first.recipe == rule.recipe
          overruled.add(first)
    if not used and not rule.optional:
      if overruled:
        raise errors.PolicyError(_never_first(rule, overruled))
      _check_harmless(rule, sites, parameters, max(stacks.values(), default=0))
    elif rule.every and not rule.optional:
      _check_every(rule, sites, parameters, indices)
  decisions = [[_decide(policy, gemms) for gemms in site] for site in chosen]
  quantised = any(d.recipe.quantises for site in decisions for d in site)
  if policy.quantises and not quantised:
    raise errors.PolicyError(
      _nothing_quantised(policy, sites, layers)
      if sites
      else _no_site(others, parameters, unfit)
    )
  return decisions


def _decide(policy: Policy, gemms: dict) -> Decision:
  rules = [gemms.get(gemm) for gemm in recipes.GEMMS]
  used = [(r.recipe if r else policy.default) or _LEFT for r in rules]
  fprop, dgrad, wgrad = (str(r) if r else "default" for r in rules)
  reasons = fprop, dgrad, wgrad
  if used[0] == used[1] == used[2]:
    return Decision(used[0], reasons)
  names = collections.Counter(recipe.name for recipe in used)
  parts = {g: getattr(r, g) for g, r in zip(recipes.GEMMS, used, strict=True)}
  return Decision(recipes.Recipe(name="+".join(names), **parts), reasons)


def _never_first(rule: Rule, overruled) -> str:
  """Why a rule that matches decides nothing."""
  earlier = "; ".join(sorted(map(str, overruled)))
  return (
    f"rule {rule} decides nothing: rules before it ({earlier}) match all that"
    " it does, and the first that matches decides; move it before them, or"
    " remove it."
  )


def _check_every(rule: Rule, sites, parameters, indices):
  """Raises unless each glob and each listed layer of a rule matches."""
  for glob in rule.paths:
    one = dataclasses.replace(rule, path=glob)
    if all(_layer_indices(one, site) is None for site in sites):
      _check_harmless(one, sites, parameters, 0)
  stacks = _stacks(indices)
  there = {*itertools.chain.from_iterable(filter(None, indices))}
  listed = rule.layers if isinstance(rule.layers, frozenset) else ()
  for layer in sorted(listed):
    named = {(s, i) for s, n in stacks.items() for i in _selected(layer, n)}
    if not named & there:
      one = dataclasses.replace(rule, layers=layer)
      _check_harmless(one, sites, parameters, max(stacks.values(), default=0))


def _check_harmless(rule, sites, parameters, layers):
  """Raises unless an unused rule leaves alone what no GEMM reads anyway."""
  named = [p for s in sites for p in s.paths]
  unread = [p for p in parameters if p not in named]
  hit = any(globs.matches(glob, path) for glob in rule.paths for path in unread)
  leaves = rule.recipe is None and rule.layers is None
  if hit and leaves and not rule.argument:
    return
  matched = [p for p in named if any(globs.matches(g, p) for g in rule.paths)]
  if matched and not layers:
    raise errors.PolicyError(
      f"rule {rule} matches {matched[0]}, which has no layer index; capture"
      " one with {layer} in the path, or scan over the stacked weights (a"
      " fori_loop that indexes them has no per-layer rules)."
    )
  if matched:
    given = f"layers={_layers_text(rule.layers)}"
    shown = "" if given in str(rule) else f" ({given})"
    raise errors.PolicyError(
      f"rule {rule}{shown} names none of the layers 0 to {layers - 1} of"
      f" {matched[0]}; correct layers=, or set optional=True."
    )
  fix = "correct its path, or set optional=True"
  if rule.argument:
    fix = f"name them with {rule.argument}= of the preset"
  if rule.argument == "heads":
    fix += ", or pass heads=() where there are none"
  given = ", ".join(f'"{glob}"' for glob in rule.paths)
  told = not globs.few(rule.paths) or given in str(rule)
  shown = "" if told else f" ({given})"
  count = sum(site.positions for site in sites)
  raise errors.PolicyError(
    f"rule {rule}{shown} matches none of the model's {count} linear layers;"
    f" {globs.suggestion(rule.paths, named)}{globs.hint(rule.paths)}; {fix}."
  )


def _no_site(others: Sequence, parameters: Sequence[str], unfit) -> str:
  """Why a model has no linear layer that could be quantised."""
  text = "the policy quantises nothing: "
  refused = [site for site in others if site.paths]
  if refused:
    site = refused[0]
    return (
      f"{text}none of the model's {len(refused)} contractions with a weight"
      f" can be quantised ({site.paths[0]}: {site.reason}); change them, or use"
      " fp4jax.policies.bf16()."
    )
  if others and all(site.kind.startswith("custom_") for site in others):
    return (
      f"{text}all contractions are inside custom_vjp or custom_jvp functions,"
      " which keep their own rules (layers that fp4jax.quantize rewrote are"
      " such); quantise the function that is written without them."
    )
  text += "no operand of any contraction comes from the parameters"
  if unfit:
    listed = ", ".join(f"{path} is {dtype}" for path, dtype in unfit[:3])
    more = ", …" if len(unfit) > 3 else ""
    text += f" of a float dtype ({listed}{more})"
  if unfit and not parameters:
    return f"{text}; pass weights as floats, which quantize makes codes of."
  return (
    f"{text}; pass the parameters as the first argument (or name its position"
    " with params_argnums) instead of closing over them."
  )


def _nothing_quantised(policy: Policy, sites, layers: int) -> str:
  """Which rules leave all linear layers alone."""
  named = [p for s in sites for p in s.paths]
  asked = [str(r) for r in policy.rules if r.recipe and r.recipe.quantises]
  wanted = f"rules {'; '.join(asked)}" if asked else "the default"
  left = "; ".join(str(r) for r in policy.rules if r.recipe is None)
  text = (
    f"the policy quantises nothing: {wanted} would, but earlier rules ({left})"
    f" leave all {sum(s.positions for s in sites)} linear layers alone"
  )
  if layers:
    return (
      f"{text}, and the model has {layers} blocks; leave fewer alone (lower"
      " first or last of policies.nemotron, or narrow layers=), or use"
      " fp4jax.policies.bf16()."
    )
  return (
    f"{text} (nearest: {globs.nearest(named[0], named)}); narrow those rules,"
    " or use fp4jax.policies.bf16()."
  )
