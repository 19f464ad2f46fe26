"""Writes docs/results.md from the comparisons in docs/results.

python -m experiments.results

``docs/results/NAME-SEED.json`` is the results.json of experiments.compare, and
``docs/results/template.md`` the text. In the text stand for what was measured:

  {{table NAME}}            every run: losses, gaps, memory, time
  {{plot NAME}}             the loss above the baseline's, step by step
  {{facts NAME}}            size, tokens, seeds, device, versions, command
  {{loss NAME RUN}}         the mean validation loss of a run
  {{gap NAME RUN}}          its mean gap to the baseline, in percent
  {{gap NAME RUN OTHER}}    its mean gap to another run
  {{spread NAME RUN}}       largest less smallest gap over the seeds, in points

so that no figure is typed.
"""

from collections.abc import Sequence
import dataclasses
import io
import json
from pathlib import Path
import re
import statistics

from absl import app
from matplotlib import figure
import numpy as np

from experiments import errors
from experiments import files
from experiments import report

_FOLDER = Path("docs/results")
_CALL = re.compile(r"\{\{([^}]*)\}\}")


@dataclasses.dataclass(frozen=True)
class Seeds:
  """One comparison, repeated with several seeds.

  Attributes:
    name: of the files.
    seeds: ascending.
    comparisons: what results.json holds, of each seed.
  """

  name: str
  seeds: tuple[int, ...]
  comparisons: tuple[dict, ...]

  @property
  def baseline(self) -> str:
    """The run that gaps are relative to."""
    return self.comparisons[0]["baseline"]

  @property
  def runs(self) -> list[str]:
    """Runs that any seed has, in order."""
    names = (name for each in self.comparisons for name in each["runs"])
    return list(dict.fromkeys(names))

  def of(self, run: str) -> dict[int, dict]:
    """A run's result by seed; raises ``UserError`` if there is none."""
    found = {
      seed: each["runs"][run]
      for seed, each in zip(self.seeds, self.comparisons, strict=True)
      if run in each["runs"]
    }
    if not found:
      raise errors.UserError(
        f"{self.name} has no run {run!r}; it has {', '.join(self.runs)}."
      )
    return found

  def losses(self, run: str) -> dict[int, float]:
    """Validation losses by seed; NaN where it is not finite."""
    return {
      seed: np.nan if (loss := result["validation_loss"]) is None else loss
      for seed, result in self.of(run).items()
    }

  def gaps(self, run: str, other: str = "") -> dict[int, float]:
    """Loss above another run's of the same seed, in percent, by seed."""
    theirs = self.losses(other or self.baseline)
    return {
      seed: 100 * (loss / theirs[seed] - 1)
      for seed, loss in self.losses(run).items()
      if seed in theirs
    }


def load(folder: Path) -> dict[str, Seeds]:
  """The comparisons of a folder, by name."""
  found: dict[str, dict[int, dict]] = {}
  for path in sorted(folder.glob("*.json")):
    match = re.fullmatch(r"([a-z_0-9]+)-(\d+)", path.stem)
    if not match:
      raise errors.UserError(f"{path} is not called NAME-SEED.json; rename it.")
    content = json.loads(path.read_text())
    if content["config"]["seed"] != int(match[2]):
      raise errors.UserError(
        f"{path} is of seed {content['config']['seed']}; rename it."
      )
    found.setdefault(match[1], {})[int(match[2])] = content
  return {
    name: Seeds(name, tuple(sorted(each)), tuple(each[s] for s in sorted(each)))
    for name, each in found.items()
  }


def _number(values: Sequence[float], form: str) -> str:
  """Values of all seeds; a value that is not finite says so."""
  return ", ".join(
    f"{x:{form}}" if np.isfinite(x) else "not finite" for x in values
  )


def table(seeds: Seeds) -> str:
  """Every run in a row, best first below the baseline."""
  lines = [
    f"| run | validation loss (seed {', '.join(map(str, seeds.seeds))}) |"
    " gap % | mean gap % | residuals MB | peak GB | skipped | s |",
    "|---|---|---|---|---|---|---|---|",
  ]
  mean = {run: statistics.fmean(seeds.gaps(run).values()) for run in seeds.runs}
  order = sorted(
    seeds.runs,
    key=lambda run: (
      run != seeds.baseline,
      not np.isfinite(mean[run]),
      mean[run],
    ),
  )
  for run in order:
    results = list(seeds.of(run).values())
    kept = [sum(r["residual_bytes"].values()) / 1e6 for r in results]
    peak = max(r["peak_bytes"] for r in results)
    cells = (
      f"`{run}`",
      _number(list(seeds.losses(run).values()), ".4f"),
      _number(list(seeds.gaps(run).values()), "+.2f"),
      _number([mean[run]], "+.2f"),
      f"{kept[0]:,.0f}",
      f"{peak / 1e9:.1f}" if peak else "-",
      ", ".join(str(r["skipped_steps"]) for r in results),
      ", ".join(f"{r['seconds']:.0f}" for r in results),
    )
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def facts(seeds: Seeds) -> str:
  """What the table is of."""
  first = seeds.comparisons[0]
  result = first["runs"][seeds.baseline]
  config = first["config"]
  processes = first["processes"]
  shared = f", {processes} runs at a time" if processes > 1 else ""
  versions = {
    f"{each['versions']['device']}, JAX {each['versions']['jax']}, commit"
    f" {each['versions']['commit'][:12]}"
    for each in seeds.comparisons
  }
  commands = "\n".join(each["commands"][0] for each in seeds.comparisons)
  return (
    f"{result['parameters']:,} parameters; {result['steps']} steps of"
    f" {result['tokens'] // result['steps']:,} tokens,"
    f" {result['tokens'] / 1e6:.1f} M in all,"
    f" {result['tokens'] / result['parameters']:.2f} a parameter; sequences of"
    f" {config['data']['sequence']}; unigram entropy"
    f" {result['unigram_entropy']:.4f} nats. {'; '.join(sorted(versions))}"
    f"{shared}.\n\n```text\n{commands}\n```"
  )


def plot(seeds: Seeds) -> figure.Figure:
  """The smoothed training loss above the baseline's of the same seed."""
  new = figure.Figure(figsize=(8, 4.5), layout="constrained")
  axes = new.add_subplot(
    title=f"{seeds.name}: training loss above {seeds.baseline}'s",
    xlabel="step",
    ylabel="% (above 0: worse)",
  )
  axes.grid(alpha=0.3)
  axes.axhline(0, color="gray", lw=1)
  others = [run for run in seeds.runs if run != seeds.baseline]
  for i, run in enumerate(others):
    for j, (seed, result) in enumerate(seeds.of(run).items()):
      where = seeds.seeds.index(seed)
      theirs = seeds.comparisons[where]["runs"][seeds.baseline]
      window = max(1, result["steps"] // 20)
      ours, base = (_curve(r, window) for r in (result, theirs))
      count = min(len(ours), len(base))
      gap = 100 * (ours[:count] / base[:count] - 1)
      axes.plot(
        np.arange(window, count + 1),
        gap[window - 1 :],
        color=f"C{i % 10}",
        ls=("-", "--", ":")[(i // 10 + j) % 3],
        lw=1,
        label=run if not j else None,
      )
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
  return new


def _curve(result: dict, window: int) -> np.ndarray:
  values = np.array(result["curves"]["loss"]["value"], float)
  return report.smooth(values, window)


def render(text: str, comparisons: dict[str, Seeds]) -> str:
  """The template with every call replaced by what was measured."""

  def call(match: re.Match) -> str:
    kind, *arguments = match[1].split()
    name = arguments[0] if arguments else ""
    if name not in comparisons:
      raise errors.UserError(
        f"{match[0]}: there are results of"
        f" {', '.join(comparisons) or 'nothing'}; add"
        " docs/results/NAME-SEED.json, or correct the template."
      )
    seeds, runs = comparisons[name], arguments[1:]
    if kind == "table" and not runs:
      return table(seeds)
    if kind == "facts" and not runs:
      return facts(seeds)
    if kind == "plot" and not runs:
      return f"![{name}: loss above {seeds.baseline}'s](results/{name}.png)"
    if kind == "loss" and len(runs) == 1:
      return f"{statistics.fmean(seeds.losses(*runs).values()):.4f}"
    if kind == "gap" and len(runs) in (1, 2):
      return f"{statistics.fmean(seeds.gaps(*runs).values()):+.2f} %"
    if kind == "spread" and len(runs) == 1:
      gaps = seeds.gaps(*runs).values()
      return f"{max(gaps) - min(gaps):.2f}"
    raise errors.UserError(
      f"{match[0]} is no call; experiments/results.py lists them."
    )

  return _CALL.sub(call, text)


def write(folder: Path, output: Path) -> None:
  """Writes the text to ``output``, and the plots to ``folder``."""
  comparisons = load(folder)
  text = render((folder / "template.md").read_text(), comparisons)
  for name, seeds in comparisons.items():
    if f"results/{name}.png" in text:
      buffer = io.BytesIO()
      plot(seeds).savefig(buffer, format="png", dpi=100)
      files.write(folder / f"{name}.png", buffer.getvalue())
  files.write(output, text)


def main(argv: list[str]) -> None:
  """Writes docs/results.md."""
  if len(argv) > 1:
    raise errors.UserError(f"argument {argv[1]!r} is no flag; leave it out.")
  output = _FOLDER.with_suffix(".md")
  write(_FOLDER, output)
  print(f"{output} is written")


if __name__ == "__main__":
  app.run(errors.explained(main))
