"""``quantize``: the function transformation."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import pathlib
from typing import Any
from typing import NamedTuple
import warnings

from flax import linen
from flax import nnx
import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from fp4jax import _jax
from fp4jax import backends
from fp4jax import dataflow
from fp4jax import errors
from fp4jax import interpreter
from fp4jax import operands
from fp4jax import policy as policy_lib
from fp4jax import recipes
from fp4jax import rounding
from fp4jax.coverage import Coverage
from fp4jax.coverage import tabulate


def quantize(
  model_fn: Callable,
  policy: policy_lib.Policy,
  *,
  params_argnums: int | Sequence[int] = 0,
  backend: str | None = None,
) -> "Quantized":
  """Transforms a function so that its linear layers train quantised.

  ``quantize`` traces ``model_fn`` and evaluates it again with every
  contraction of one weight and one other operand replaced by ``fp4jax.dot``,
  where the policy says so. Everything else, layers that the policy leaves
  alone included, is computed by the very same operations as before.

  Args:
    model_fn: a function whose first argument holds the parameters: a pytree, a
      mapping of linen collections (``{"params": ..., "batch_stats": ...}``;
      only "params" are weights), an ``nnx.Module``, or ``(graphdef, state)``
      of one. A bare array is called "params".
    policy: which recipe each layer follows.
    params_argnums: positions of the arguments that hold the parameters.
    backend: a name in ``backends.BACKENDS``, or None to choose by device.

  Returns:
    A function of the same signature, plus ``fp4_key=``: a PRNG key, needed
    where a recipe with stochastic rounding is differentiated; and
    ``fp4_weights=``: what its method ``weight_codes`` gives. State of NNX
    objects (modules, ``nnx.Rngs``, variables, metrics), in whichever argument,
    that the call writes arrives. Its jaxpr is cached by shapes,
    dtypes and static arguments.

  Raises:
    PolicyError: when called, if the policy does not fit the model.
    MissingKeyError: when differentiated without a key that the recipe needs.
    ValueError: ``policy`` is no ``Policy``, ``params_argnums`` no position or
      positions, ``backend`` no backend's name, or ``model_fn`` no function of
      its parameters: a module, its class or bound method, or quantised already.

  >>> import fp4jax, jax, jax.numpy as jnp
  >>> f = fp4jax.quantize(lambda w, x: x @ w, fp4jax.policies.all_linear())
  >>> w, x = jnp.full((32, 8), 0.5), jnp.ones((4, 32))
  >>> f(w, x).shape
  (4, 8)
  >>> key = jax.random.key(0)
  >>> jax.grad(lambda w: f(w, x, fp4_key=key).sum())(w).dtype
  dtype('float32')

  References:
    NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.
  """
  _check_policy(policy)
  _check_function(model_fn)
  backends.check_name(backend)
  return Quantized(model_fn, policy, _positions(params_argnums), backend)


def _positions(params_argnums) -> tuple[int, ...]:
  """Positions of arguments as a tuple."""
  several = isinstance(params_argnums, Iterable)
  positions = tuple(params_argnums) if several else (params_argnums,)
  if not positions or not all(map(errors.is_integer, positions)):
    raise ValueError(
      f"quantize: params_argnums={errors.shown(params_argnums)}; needed the"
      " positions of the arguments that hold the parameters, an int or a tuple"
      " of ints; write params_argnums=0 for the first."
    )
  return positions


def _check_policy(policy):
  if isinstance(policy, policy_lib.Policy):
    return
  fix = "pass one of fp4jax.policies, as in fp4jax.policies.all_linear()"
  if isinstance(policy, recipes.Recipe):
    fix = "pass fp4jax.Policy(default=recipe), which all linear layers follow"
  raise ValueError(
    f"quantize: policy={errors.shown(policy)} is no fp4jax.Policy; {fix}."
  )


def _check_function(model_fn):
  name = type(model_fn).__name__
  if isinstance(model_fn, Quantized):
    raise ValueError(
      f"quantize: model_fn={model_fn!r} is quantised already; pass the function"
      " that it was made from, and one policy."
    )
  owner = getattr(model_fn, "__self__", None)
  bound = isinstance(owner, linen.Module) and owner.scope is not None
  if bound or isinstance(owner, nnx.Pytree):
    raise ValueError(
      f"quantize: model_fn={errors.shown(model_fn)} is a method of a module"
      " that holds its own parameters, needed a function that takes them as"
      " first argument; pass model.apply of linen, or lambda model, x: model(x)"
      " of NNX."
    )
  if isinstance(model_fn, type) and issubclass(
    model_fn, (linen.Module, nnx.Module)
  ):
    raise ValueError(
      f"quantize: model_fn is a class ({model_fn.__name__}), needed a function;"
      " make a module of it and pass its apply (linen), or lambda model, x:"
      " model(x) (NNX)."
    )
  if isinstance(model_fn, linen.Module):
    raise ValueError(
      f"quantize: model_fn is a linen module ({name}), needed a function; pass"
      " its apply, as in fp4jax.quantize(model.apply, policy)."
    )
  if isinstance(model_fn, nnx.Module):
    raise ValueError(
      f"quantize: model_fn is an nnx module ({name}), needed a function that"
      " takes it as first argument; pass lambda model, x: model(x)."
    )
  if not callable(model_fn):
    raise ValueError(
      f"quantize: model_fn={errors.shown(model_fn)} is not callable; pass the"
      " model's apply function, or lambda model, x: model(x) for NNX."
    )


def coverage(quantized: "Quantized", *args, **kwargs) -> Coverage:
  """Every contraction of a quantised function, and what becomes of it.

  Args:
    quantized: what ``quantize`` returned.
    *args: its arguments, arrays or ``jax.ShapeDtypeStruct``.
    **kwargs: its keyword arguments.

  Returns:
    A table: ``print`` it, or read its ``rows``.

  Raises:
    ValueError: ``quantized`` does not come from ``quantize``, or its arguments
      are missing.
    PolicyError: the policy does not fit the model.
  """
  if not isinstance(quantized, Quantized):
    raise ValueError(
      f"coverage: {errors.shown(quantized)} does not come from fp4jax.quantize;"
      " pass the function that quantize returned, not one wrapped around it."
    )
  if not args:
    raise ValueError(
      "coverage: got no positional arguments, needed those of a call of the"
      " function; pass arrays or jax.ShapeDtypeStruct, as in"
      " fp4jax.coverage(apply, variables, tokens)."
    )
  kwargs.pop("fp4_key", None)
  return quantized.program(args, kwargs).coverage


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
  """A traced and planned model, for one structure and shape of arguments."""

  jaxpr: Any
  plan: interpreter.Plan
  coverage: Coverage

  @functools.cached_property
  def jitted(self):
    """The rewritten model, of constants, arguments, key and codes."""
    jaxpr, _ = _jax.open_jaxpr(self.jaxpr)

    def rewritten(consts, args, key, weights):
      return interpreter.evaluate(jaxpr, consts, args, self.plan, key, weights)

    return jax.jit(rewritten)

  @functools.cached_property
  def weight_codes(self):
    """The codes of all weights, of constants and arguments."""
    jaxpr, _ = _jax.open_jaxpr(self.jaxpr)

    def codes(consts, args):
      return interpreter.weight_codes(jaxpr, consts, args, self.plan)

    return jax.jit(codes)


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
  """One call's arguments, taken apart.

  Attributes:
    leaves: the arrays.
    flows: what each of them is to the dataflow.
    trace: ``jax.jit`` of the model as a function of the leaves; it returns the
      model's outputs and the state of NNX objects.
    nodes: NNX objects among the arguments.
    remarks: what is said where these arguments are not what they seem.
  """

  leaves: list
  flows: tuple[dataflow.Flow, ...]
  trace: Any
  nodes: list
  remarks: "_Remarks"


class _Remarks(NamedTuple):
  """What errors and warnings say of a call's arguments.

  Attributes:
    unfit: the path and dtype of parameters that are no floats.
    bare: the parameters, where they are one array; else "".
    beside: what else looks like parameters, and how to pass it; else "".
  """

  unfit: tuple[tuple[str, str], ...]
  bare: str
  beside: str


class Quantized:
  """A quantised function: what ``quantize`` returns.

  It is called like the function that it was made from, with ``fp4_key=``
  besides. It holds traced programs, and no state that a result depends on.
  """

  def __init__(self, model_fn, policy, params_argnums, backend):
    functools.update_wrapper(self, model_fn, updated=())
    self.model_fn = model_fn
    self.policy = policy
    self.params_argnums = params_argnums
    self.backend = backend
    self._function = functools.lru_cache(maxsize=256)(self._make_function)
    self._program = functools.lru_cache(maxsize=256)(self._make_program)

  def __repr__(self):
    """The function's name and the policy, in a line."""
    name = getattr(self.model_fn, "__qualname__", type(self.model_fn).__name__)
    return f"<quantised {name}: {self.policy}>"

  def __call__(self, *args, fp4_key=None, fp4_weights=None, **kwargs):
    if fp4_key is not None:
      rounding.key_words(fp4_key)
    call, traced, program, arrays = self._traced(args, kwargs)
    _check_weights(fp4_weights, program, arrays)
    inputs = (*arrays, fp4_key, fp4_weights)
    rewritten = program.jitted.trace(*inputs)
    flat = core.jaxpr_as_fun(rewritten.jaxpr)(*jax.tree.leaves(inputs))
    tree = jax.tree.structure(traced.out_info)
    out, state = jax.tree.unflatten(tree, flat)
    if call.nodes:
      _write_back(call.nodes, state, traced)
    return out

  def weight_codes(self, *args, **kwargs) -> dict[str, Any]:
    """Quantises the weights once, for several calls: ``fp4_weights=``.

    For gradient accumulation, where the weights stay as they are from one
    micro-batch to the next. Same bits. The codes are constants of a call:
    gradients are those of the weights themselves, which are not read.

    Args:
      *args: those of a call; of arrays besides the parameters only shapes and
        dtypes count.
      **kwargs: its keyword arguments.

    Returns:
      Codes and scales by site; a pytree. They are those of these parameters:
      after an update of them ask again. Weights inside of ``lax.cond``,
      ``lax.while_loop``, ``jax.shard_map`` and scans that do not divide them,
      and experts of a ``ragged_dot``, are not among them and are quantised in
      every call.

    >>> import fp4jax, jax, jax.numpy as jnp
    >>> f = fp4jax.quantize(lambda w, x: x @ w, fp4jax.policies.all_linear())
    >>> w, x = jnp.full((32, 8), 0.5), jnp.ones((4, 32))
    >>> codes = f.weight_codes(w, x)
    >>> list(codes)
    ['0:params']
    >>> bool(jnp.array_equal(f(w, x, fp4_weights=codes), f(w, x)))
    True
    """
    _, _, program, arrays = self._traced(args, kwargs)
    return program.weight_codes(*arrays)

  def program(self, args, kwargs) -> _Program:
    """The planned model for these arguments."""
    return self._traced(args, kwargs)[2]

  def _traced(self, args, kwargs) -> tuple:
    """A call, its trace, its program, and that one's constants and inputs."""
    call = self._take_apart(args, kwargs)
    traced = call.trace.trace(*call.leaves)
    consts, captured = _jax.closure(traced)
    # What the model captured is data to it.
    around = tuple(_flow(value, None) for value in captured)
    remarks = call.remarks
    closed = next(filter(_is_matrix, [*consts, *captured]), None)
    if remarks.bare and not remarks.beside and closed is not None:
      remarks = remarks._replace(
        beside=f"the function closes over {_text(closed)}: pass the parameters"
        " as its argument"
      )
    program = self._program(traced.jaxpr, (*around, *call.flows), remarks)
    return call, traced, program, (consts, [*captured, *call.leaves])

  def _take_apart(self, args, kwargs) -> _Call:
    for argnum in self.params_argnums:
      if not -len(args) <= argnum < len(args):
        raise ValueError(
          f"quantize: params_argnums={self.params_argnums} but the call has"
          f" {len(args)} positional arguments; pass the parameters by"
          " position."
        )
    params = {argnum % len(args) for argnum in self.params_argnums}

    def weight_name(owner, inner=()):
      """The name of what stands at a path, None if it is no parameter."""
      if owner[0].idx or owner[1].idx not in params:
        return None
      collections = _has_collections(args[owner[1].idx])
      if collections and _path_name(owner[2:3]) != "params":
        return None
      return _path_name([*owner[2:], *inner]) or "params"

    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), _is_node)
    nodes = [leaf for _, leaf in paths if _is_node(leaf)]
    graphdef, state = nnx.split(nodes) if nodes else (None, {})
    leaves, names, flows, static = [], [], [], []
    owners = []
    for path, leaf in paths:
      if _is_node(leaf):
        static.append(_NODE)
        owners.append(path)
      elif _is_array(leaf):
        static.append(_ARRAY)
        leaves.append(leaf)
        names.append(weight_name(path))
        flows.append(_flow(leaf, names[-1]))
      else:
        static.append(_Static(leaf))
    state_paths = jax.tree_util.tree_flatten_with_path(
      state, lambda x: isinstance(x, nnx.Variable)
    )[0]
    for path, variable in state_paths:
      name = weight_name(owners[path[0].key], path[1:])
      for leaf in jax.tree.leaves(variable):
        leaves.append(leaf)
        names.append(name)
        flows.append(_flow(leaf, name, type(variable)))
    structure = (
      tree,
      tuple(static),
      graphdef,
      jax.tree.structure(state) if nodes else None,
    )
    try:
      hash(structure)
      trace = self._function(*structure)
    except TypeError:
      trace = self._make_function(*structure)
    unfit = tuple(
      (name, str(leaf.dtype))
      for name, leaf, flow in zip(names, leaves, flows, strict=True)
      if name is not None and flow == dataflow.CONSTANT
    )
    remarks = _Remarks(unfit, *_mistaken(args, kwargs, params))
    return _Call(leaves, tuple(flows), trace, nodes, remarks)

  def _make_function(self, tree, static, graphdef, state_tree):
    """``jax.jit`` of the model as a function of its array leaves."""
    arrays = sum(item is _ARRAY for item in static)

    def model(*leaves):
      given = iter(leaves[:arrays])
      nodes = []
      if state_tree is not None:
        state = jax.tree.unflatten(state_tree, leaves[arrays:])
        nodes = nnx.merge(graphdef, state)
      remaining = iter(nodes)

      def fill(item):
        if item is _ARRAY:
          return next(given)
        return next(remaining) if item is _NODE else item.value

      args, kwargs = jax.tree.unflatten(tree, [fill(item) for item in static])
      out = self.model_fn(*args, **kwargs)
      if state_tree is None:
        return out, ()
      after_def, after = nnx.split(nodes)
      if after_def != graphdef:
        raise ValueError(
          "quantize: the call added or removed variables of an nnx.Module"
          " (sow, a new cache); create them before, in the constructor or by"
          " one call of the untransformed module."
        )
      return out, after

    return jax.jit(model)

  def _make_program(self, jaxpr, flows, remarks) -> _Program:
    sites = dataflow.find_sites(jaxpr, flows)
    linear = {s.id: s for s in sites if s.weight and not s.reason}
    parameters = sorted({w.path for f in flows for w in f.weights})
    resolved = policy_lib.resolve(
      self.policy,
      list(linear.values()),
      parameters,
      [site for site in sites if site.id not in linear],
      remarks.unfit,
    )
    decisions = dict(zip(linear, resolved, strict=True))
    for site in resolved:
      for decision in site:
        backends.check(decision.recipe, self.backend)
    quantised = any(d.recipe.quantises for site in resolved for d in site)
    inside = [s.name for s in sites if "transpose(" in s.name]
    if quantised and inside:
      _warn(
        f"quantize: {errors.shown(self.model_fn)} differentiates inside itself"
        f" ({inside[0]}), where derivatives are not the recipe's: GEMMs of its"
        " backward pass are taken for layers, or stay as written. Pass the"
        " forward function and differentiate what quantize returns."
      )
    if quantised and remarks.beside:
      _warn(
        f"quantize: the parameters of {errors.shown(self.model_fn)} are one"
        f" array ({remarks.bare}), while {remarks.beside}. Data in the place of"
        " the parameters is quantised as a weight, and its products with the"
        " real ones are left alone."
      )
    plan = interpreter.Plan(linear, decisions, self.backend)
    return _Program(jaxpr, plan, tabulate(sites, decisions, self.backend))


def _check_weights(weights, program, arrays):
  """Raises ValueError for codes of another model, policy or backend."""
  if weights is None:
    return
  fix = (
    "pass what weight_codes gave for these parameters, this policy and this"
    " backend"
  )
  if not isinstance(weights, Mapping):
    raise ValueError(
      f"fp4_weights={errors.shown(weights)}, needed codes of weights; {fix}."
    )
  needed = jax.eval_shape(program.weight_codes, *arrays)
  if set(weights) != set(needed):
    raise ValueError(
      f"fp4_weights holds codes of {errors.shown(sorted(weights))}, needed"
      f" those of {errors.shown(sorted(needed))}; {fix}."
    )
  for path, codes in needed.items():
    given, asked = _facts(weights[path]), _facts(codes)
    wrong = [name for name in asked if given.get(name) != asked[name]]
    if wrong:
      got = ", ".join(f"{n}={given.get(n)}" for n in wrong)
      need = ", ".join(f"{n}={asked[n]}" for n in wrong)
      raise ValueError(
        f"fp4_weights[{path!r}] holds codes of {got}, needed {need}; {fix}."
      )


def _facts(codes) -> dict[str, Any]:
  """What tells the codes of a weight from others', by name."""
  found = [c for c in jax.tree.leaves(codes, is_leaf=_is_codes) if _is_codes(c)]
  facts: dict[str, Any] = {
    "arrays": [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(found)],
    "layout": [type(c.array).__name__ for c in found],
    "contract": [c.contract for c in found],
  }
  for field in dataclasses.fields(recipes.Operand):
    facts[field.name] = [getattr(c.quantised, field.name) for c in found]
  return facts


def _is_codes(x) -> bool:
  return isinstance(x, operands.GemmOperand)


_NODE, _ARRAY = object(), object()
_PACKAGE = str(pathlib.Path(__file__).parent)


class _Static:
  """A static argument, told from equal values of another type or sign."""

  def __init__(self, value):
    self.value = value
    floating = isinstance(value, (float, complex))
    # 0.0 == -0.0, and NaN equals nothing.
    self._token = (type(value), repr(value) if floating else value)

  def __eq__(self, other):
    return isinstance(other, _Static) and self._token == other._token

  def __hash__(self):
    return hash(self._token)


def _is_node(x) -> bool:
  """Whether an object of NNX keeps state of its own, which a call may write."""
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def _is_array(x) -> bool:
  return isinstance(
    x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
  )


def _warn(text: str):
  """Warns of the caller's line, outside of this package."""
  warnings.warn(text, skip_file_prefixes=(_PACKAGE,))


def _text(x) -> str:
  """The dtype and shape of an array: float32[4,32]."""
  return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def _is_matrix(x) -> bool:
  """Whether an array could be a weight."""
  return jnp.issubdtype(x.dtype, jnp.floating) and jnp.ndim(x) > 1


def _mistaken(args, kwargs, params: set[int]) -> tuple[str, str]:
  """The parameters if they are one array, and what looks more like them."""
  bare = [i for i in sorted(params) if _is_array(args[i])]
  if not bare:
    return "", ""
  given = f"argument {bare[0]}: {_text(args[bare[0]])}"
  others = {i: x for i, x in enumerate(args) if i not in params} | kwargs
  for place, value in others.items():
    if isinstance(value, nnx.Module):
      what = f"is an nnx module ({type(value).__name__})"
    elif _has_collections(value):
      what = 'is a mapping with "params"'
    else:
      continue
    fix = f"name its position with params_argnums={place}"
    if isinstance(place, str):
      fix = "pass it by position, and name that with params_argnums="
    return given, f"argument {place} {what}: {fix}"
  return given, ""


def _path_name(path) -> str:
  """A pytree path as a site's name: keys joined by slashes."""

  def text(entry):
    for attribute in ("key", "name", "idx"):
      if hasattr(entry, attribute):
        return str(getattr(entry, attribute))
    return str(entry)

  return "/".join(map(text, path))


def _flow(leaf, name: str | None, variable: type | None = None):
  """What one array argument is to the dataflow."""
  is_param = variable is None or issubclass(variable, nnx.Param)
  if name is None or not is_param:
    return dataflow.DATA if jnp.ndim(leaf) else dataflow.DATA.scalar()
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    return dataflow.CONSTANT
  return dataflow.Flow(frozenset({dataflow.Weight(name)}))


def _has_collections(tree) -> bool:
  """Whether a parameters argument is a mapping of linen collections."""
  return isinstance(tree, Mapping) and "params" in tree


def _write_back(nodes, state, traced):
  """Writes changed state into the NNX objects that the caller holds."""
  jaxpr, _ = _jax.open_jaxpr(traced.jaxpr)
  inputs = set(jaxpr.invars)
  count = len(jax.tree.leaves(state))
  outvars = jaxpr.outvars[len(jaxpr.outvars) - count :] if count else []
  unchanged = iter(
    not _jax.is_literal(var) and var in inputs for var in outvars
  )
  flat = nnx.to_flat_state(state)
  changed = [
    (path, variable)
    for path, variable in flat
    if not all([next(unchanged) for _ in jax.tree.leaves(variable)])
  ]
  if changed:
    nnx.update(nodes, nnx.from_flat_state(changed))
