"""Coverage: every contraction of a model, and what becomes of it."""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import re

from fp4jax import backends
from fp4jax import dataflow
from fp4jax import policy
from fp4jax import recipes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One contraction, or one run of layers of a scanned one.

  Attributes:
    path: the path of its weight, "" where it has none.
    name: the name stack (linen's module path), "" where there is none.
    kind: the primitive.
    lhs_shape: shape of the left operand.
    rhs_shape: shape of the right operand.
    layers: (first, last) layers of a scanned stack, else None.
    fprop: what the forward GEMM does.
    dgrad: what the input's gradient does.
    wgrad: what the weight's gradient does.
    reason: which rule decided, or why it is left alone.
    backend: what serves it, and why; None where nothing is quantised.
  """

  path: str
  name: str
  kind: str
  lhs_shape: tuple[int, ...] | None
  rhs_shape: tuple[int, ...] | None
  layers: tuple[int, int] | None
  fprop: str
  dgrad: str
  wgrad: str
  reason: str
  backend: backends.Choice | None = None

  @property
  def quantised(self) -> bool:
    """Whether any of its GEMMs is quantised."""
    return {self.fprop, self.dgrad, self.wgrad} != {LEFT}


LEFT = "as written"
_COLUMNS = ("site", "layers", "lhs", "rhs", "fprop", "dgrad", "wgrad", "reason")


@dataclasses.dataclass(frozen=True)
class Coverage:
  """A table of all contractions, in order of execution."""

  rows: tuple[Row, ...]

  @property
  def quantised(self) -> tuple[Row, ...]:
    """The rows with a quantised GEMM."""
    return tuple(row for row in self.rows if row.quantised)

  def __str__(self) -> str:
    cells = [_COLUMNS, *_merged(map(_cells, self.rows))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
      "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
      for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    linear = [row for row in self.rows if row.path]
    quantised = sum(map(_layers, self.quantised))
    lines.append(
      f"{quantised} of {sum(map(_layers, linear))} linear layers quantised"
    )
    for backend in dict.fromkeys(row.backend for row in self.quantised):
      if backend is not None:
        lines.append(f"backend {backend.name}: {backend.reason}")
    return "\n".join(lines)


def _layers(row: Row) -> int:
  return row.layers[1] - row.layers[0] + 1 if row.layers else 1


def _cells(row: Row) -> tuple[str, ...]:
  first, last = row.layers or ("", "")
  layers = f"{first}" if first == last else f"{first}-{last}"
  shapes = [
    "" if shape is None else "x".join(map(str, shape)) or "scalar"
    for shape in (row.lhs_shape, row.rhs_shape)
  ]
  site = row.path or (f"({row.name})" if row.name else f"({row.kind})")
  if row.kind != "dot_general" and row.path:
    site += f" ({row.kind})"
  return (site, layers, *shapes, row.fprop, row.dgrad, row.wgrad, row.reason)


_NUMBER = re.compile(r"\d+")


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
  """Rows alike, or but for one number of the site's name, as one row."""
  groups: dict[tuple, list[tuple[int, ...]]] = {}
  for site, *rest in rows:
    numbers = tuple(int(n) for n in _NUMBER.findall(site))
    groups.setdefault((_NUMBER.sub("#", site), *rest), []).append(numbers)
  merged = []
  for (site, *rest), members in groups.items():
    times = collections.Counter(members)
    columns = [set(column) for column in zip(*times, strict=True)]
    varying = sum(len(numbers) > 1 for numbers in columns)
    if varying > 1 or len(set(times.values())) > 1:
      parts = [(tuple(map(str, m)), count) for m, count in times.items()]
    else:
      parts = [(tuple(map(_ranges, columns)), times[members[0]])]
    pieces = site.split("#")
    for part, count in parts:
      name = "".join(map("".join, zip(pieces, (*part, ""), strict=True)))
      merged.append((name + f" ({count} times)" * (count > 1), *rest))
  return merged


def _ranges(numbers: Iterable[int]) -> str:
  """Integers in short: ``5``, ``[1-3,7]``."""
  first, *others = sorted(numbers)
  if not others:
    return str(first)
  runs: list[list[int]] = [[first, first]]
  for n in others:
    if n == runs[-1][1] + 1:
      runs[-1][1] = n
    else:
      runs.append([n, n])
  return "[" + ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs) + "]"


def tabulate(
  sites: Iterable[dataflow.Site],
  decisions: Mapping[dataflow.Id, Sequence[policy.Decision]],
  backend: str | None = None,
) -> Coverage:
  """The coverage of sites under the decisions of a policy."""
  rows: list[Row] = []
  for site in sites:
    left = policy.Decision(recipes.bf16(), (site.reason,) * 3)
    position = 0
    for decision, run in itertools.groupby(decisions.get(site.id, [left])):
      count = len(list(run))
      layers = (position, position + count - 1) if site.scanned else None
      rows.append(_row(site, decision, layers, backend))
      position += count
  return Coverage(tuple(rows))


def _row(site, decision, layers, backend) -> Row:
  gemms = {
    gemm: LEFT if how is None else str(how)
    for gemm in recipes.GEMMS
    for how in [getattr(decision.recipe, gemm)]
  }
  quantised = set(gemms.values()) != {LEFT}
  return Row(
    backend=backends.check(decision.recipe, backend) if quantised else None,
    path=site.path,
    name=site.name,
    kind=site.kind,
    lhs_shape=site.lhs and tuple(site.lhs.shape),
    rhs_shape=site.rhs and tuple(site.rhs.shape),
    layers=layers,
    reason="; ".join(dict.fromkeys(decision.reasons)),
    **gemms,
  )
