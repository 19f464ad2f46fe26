"""The report of a comparison: HTML without links, PNG plots, JSON."""

import base64
from collections.abc import Sequence
import dataclasses
import html
import io
import json
from pathlib import Path
import string

from matplotlib import figure
import numpy as np

from experiments import files
from experiments import metrics
from experiments import tasks
from experiments import train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One finished run and the records of its ``metrics.jsonl``.

  Attributes:
    name: a recipe, and fields that differ from the comparison's.
    result: what it left.
    records: of steps and validations.
  """

  name: str
  result: train.Result
  records: list[dict]

  def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric; NaN where a value was not finite."""
    found = [(r["step"], r[name]) for r in self.records if name in r]
    steps, values = zip(*found, strict=True)
    return np.array(steps), np.array(values, float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Runs that differ in their recipe only; the first is the baseline.

  Attributes:
    runs: at least one.
    config: what they share.
    commands: that reproduce the comparison, and each run alone.
    versions: of packages, and the device.
    seconds: that the comparison took, finished runs not repeated.
    processes: that trained at a time; 0 is one run after the other.
  """

  runs: tuple[Run, ...]
  config: dict
  commands: tuple[str, ...]
  versions: dict[str, str]
  seconds: float
  processes: int = 0

  @property
  def baseline(self) -> Run:
    """The run that gaps are relative to."""
    return self.runs[0]

  @property
  def task(self) -> tasks.Task:
    """What the runs learned."""
    return tasks.of(self.config["model"]["name"])

  def gap(self, run: Run) -> float:
    """Validation loss above the baseline's, in percent; NaN if unknown."""
    loss = self.baseline.result.validation_loss
    return 100 * (run.result.validation_loss / loss - 1)


def _rows(comparison: Comparison) -> list[tuple[str, ...]]:
  labelled = comparison.baseline.result.validation_accuracy is not None
  rows: list[tuple[str, ...]] = [
    (
      "recipe",
      "validation loss",
      *["accuracy %"] * labelled,
      "gap %",
      "tokens/s",
      "residuals MB",
      "peak GB",
      "skipped steps",
      "compile s",
      "seconds",
    )
  ]
  for run in comparison.runs:
    result = run.result
    rows.append(
      (
        run.name,
        metrics.shown(result.validation_loss, ".4f"),
        *_percent(result.validation_accuracy),
        metrics.shown(comparison.gap(run), "+.2f"),
        f"{result.tokens_per_second:,.0f}",
        f"{sum(result.residual_bytes.values()) / 1e6:.2f}",
        f"{result.peak_bytes / 1e9:.2f}" if result.peak_bytes else "-",
        str(result.skipped_steps),
        f"{result.compile_seconds:.1f}",
        f"{result.seconds:.0f}",
      )
    )
  return rows


def _percent(share: float | None) -> list[str]:
  return [] if share is None else [f"{100 * share:.2f}"]


def _facts(comparison: Comparison) -> str:
  result, task = comparison.baseline.result, comparison.task
  return (
    f"{result.parameters:,} parameters, {result.steps} steps,"
    f" {result.tokens:,} tokens; {task.baseline} of the training"
    f" {task.example}s {result.unigram_entropy:.4f} nats; gaps relative to"
    f" {comparison.baseline.name}; one seed ({comparison.config['seed']});"
    f" {comparison.versions['device']}{_shared(comparison)};"
    f" {comparison.seconds:.0f} s"
  )


def _shared(comparison: Comparison) -> str:
  """What several processes at a time mean for speeds."""
  if comparison.processes < 2:
    return ""
  return (
    f", shared by {comparison.processes} runs at a time, so that speeds tell"
    " nothing"
  )


def verdict(comparison: Comparison) -> str:
  """What came out, and what one seed cannot tell."""
  baseline, *others = comparison.runs
  loss = metrics.shown(baseline.result.validation_loss, ".4f")
  if not others:
    return f"{baseline.name} ends at validation loss {loss}."
  gaps = ", ".join(
    f"{run.name} {metrics.shown(run.result.validation_loss, '.4f')}"
    f" ({metrics.shown(comparison.gap(run), '+.2f')} %)"
    for run in others
  )
  return (
    f"Final validation loss: {baseline.name} {loss}, {gaps}. Whether a"
    " gap is within the noise of a run is not known from one seed"
    f" ({comparison.config['seed']}): repeat with other --config.seed to tell."
  )


_EMULATED = (
  "FP4 arithmetic is emulated, so this is not the speed of FP4 hardware. On a"
  " CPU, BF16 arithmetic is slower than FP32: BF16 is no yardstick there."
)


def summary(comparison: Comparison) -> str:
  """The outcome as plain text."""
  rows = _rows(comparison)
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True))
    for row in rows
  ]
  run = comparison.runs[-1]
  last = run.result
  sample = []
  if last.sample is not None:
    sample = [f"\nsample of {run.name}:", last.sample]
  return "\n".join(
    [
      f"\ncoverage of {run.name}:",
      last.coverage,
      *sample,
      "",
      *lines,
      f"tokens/s: {_EMULATED}",
      _facts(comparison),
      verdict(comparison),
    ]
  )


def smooth(values: np.ndarray, window: int) -> np.ndarray:
  """Mean of the last ``window`` values that are finite.

  >>> smooth(np.array([1.0, 3.0, np.nan, 5.0]), 2).tolist()
  [1.0, 2.0, 3.0, 5.0]
  """
  finite = np.isfinite(values)
  total = np.cumsum(np.where(finite, values, 0.0))
  count = np.cumsum(finite)
  before = np.arange(len(values)) - window
  earlier = lambda x: np.where(before >= 0, x[before], 0)
  with np.errstate(invalid="ignore"):
    return (total - earlier(total)) / (count - earlier(count))


def plots(comparison: Comparison) -> dict[str, figure.Figure]:
  """The figures, by name."""
  return {
    "loss": _loss(comparison),
    "gap": _gap(comparison),
    "memory": _memory(comparison.runs),
    "speed": _speed(comparison.runs),
  }


def captions(comparison: Comparison) -> dict[str, str]:
  """A sentence a figure, by name."""
  baseline, task = comparison.baseline, comparison.task
  lines = f"the training loss, mean of the last {_window(baseline)} steps"
  return {
    "loss": (
      f"Lines are {lines}, dots the validation loss, in {task.unit}; a model"
      f" below the dotted line knows more than how frequent each {task.target}"
      " is."
    ),
    "gap": (
      f"How much higher the loss is than {baseline.name}'s at the same"
      f" step, in percent: above 0 is worse; lines are {lines}, dots the"
      " validation loss."
    ),
    "memory": (
      "What the forward pass of one micro-batch keeps for the backward pass, by"
      " dtype, in MB (1e6 bytes), counted in the traced program; uint8 holds"
      " codes and block scales, parameters and optimizer are not counted."
    ),
    "speed": (
      "Median speed of the training steps, compilation left out, on"
      f" {comparison.versions['device']}; {_EMULATED}"
    ),
  }


def _axes(title: str, x: str, y: str):
  new = figure.Figure(figsize=(7, 4), layout="constrained")
  axes = new.add_subplot(title=title, xlabel=x, ylabel=y)
  axes.grid(alpha=0.3)
  return new, axes


def _window(run: Run) -> int:
  return max(1, run.result.steps // 20)


def _loss(comparison: Comparison) -> figure.Figure:
  new, axes = _axes("Loss", "step", comparison.task.unit)
  for i, run in enumerate(comparison.runs):
    color, name = f"C{i}", run.name
    steps, losses = run.series("loss")
    axes.plot(steps, smooth(losses, _window(run)), color=color, label=name)
    axes.plot(*run.series("validation_loss"), "o", color=color)
  entropy = comparison.baseline.result.unigram_entropy
  axes.axhline(entropy, color="gray", ls=":", label=comparison.task.baseline)
  axes.plot([], [], "o", color="gray", label="validation")
  axes.legend()
  return new


def _gap(comparison: Comparison) -> figure.Figure:
  title = f"Loss above {comparison.baseline.name}'s"
  new, axes = _axes(title, "step", "% (above 0: worse)")
  window = _window(comparison.baseline)
  for i, run in enumerate(comparison.runs[1:], 1):
    for name, style in (("loss", "-"), ("validation_loss", "o")):
      width = window if name == "loss" else 1
      steps, ours = run.series(name)
      _, theirs = comparison.baseline.series(name)
      gap = 100 * (smooth(ours, width) / smooth(theirs, width) - 1)
      label = run.name if name == "loss" else None
      axes.plot(
        steps[width - 1 :], gap[width - 1 :], style, c=f"C{i}", label=label
      )
  axes.axhline(0, color="gray", lw=1, label=comparison.baseline.name)
  axes.plot([], [], "o", color="gray", label="validation")
  axes.legend()
  return new


def _memory(runs: Sequence[Run]) -> figure.Figure:
  new, axes = _axes(
    "Kept for the backward pass", "recipe", "MB (1e6 bytes) a micro-batch"
  )
  names = [run.name for run in runs]
  kept = [run.result.residual_bytes for run in runs]
  below = np.zeros(len(runs))
  for dtype in sorted(set().union(*kept)):
    sizes = [sizes.get(dtype, 0) / 1e6 for sizes in kept]
    axes.bar(names, sizes, bottom=below, label=dtype)
    below += sizes
  axes.set_ylim(0, 1.05 * max(below) or None)
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)
  return new


def _speed(runs: Sequence[Run]) -> figure.Figure:
  new, axes = _axes(
    "Speed (emulated FP4: no FP4 hardware ran)", "recipe", "tokens/s"
  )
  names = [run.name for run in runs]
  axes.bar(names, [run.result.tokens_per_second for run in runs])
  return new


_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>fp4jax: $title</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto;
       padding: 0 1em; }
table { border-collapse: collapse; }
th, td { border: 1px solid #ccc; padding: .2em .6em; text-align: right; }
pre { background: #f6f6f6; padding: .6em; overflow-x: auto; font-size: 12px; }
img { max-width: 100%; }
figure { margin: 1em 0; }
</style>
<h1>$title</h1>
<p><b>$verdict</b></p>
<p>$facts</p>
$table
$figures
<h2>Coverage</h2>
$coverage
$samples
<h2>Commands</h2>
<pre>$commands</pre>
<h2>Versions</h2>
<pre>$versions</pre>
<h2>Configuration</h2>
<pre>$config</pre>
</html>
""")


def page(comparison: Comparison, images: dict[str, bytes]) -> str:
  """The report as one HTML file, with nothing to load."""
  head, *body = [
    "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
    for row in _rows(comparison)
  ]
  rows = [head.replace("td>", "th>"), *body]
  versions, texts = comparison.versions, captions(comparison)
  written = {
    run.name: run.result.sample
    for run in comparison.runs
    if run.result.sample is not None
  }
  samples = f"<h2>Samples</h2>\n{_blocks(written)}" if written else ""
  return _PAGE.substitute(
    title=" vs ".join(html.escape(run.name) for run in comparison.runs),
    verdict=html.escape(verdict(comparison)),
    facts=html.escape(_facts(comparison)),
    table=f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>",
    figures="\n".join(
      f'<figure><img alt="{name}" src="data:image/png;base64,'
      f'{base64.b64encode(image).decode()}">\n'
      f"<figcaption>{html.escape(texts[name])}</figcaption></figure>"
      for name, image in images.items()
    ),
    coverage=_blocks({r.name: r.result.coverage for r in comparison.runs}),
    samples=samples,
    commands=html.escape("\n".join(comparison.commands)),
    versions=html.escape("\n".join(f"{k} {v}" for k, v in versions.items())),
    config=html.escape(json.dumps(comparison.config, indent=2)),
  )


def _blocks(texts: dict[str, str]) -> str:
  return "\n".join(
    f"<h3>{html.escape(name)}</h3>\n<pre>{html.escape(text)}</pre>"
    for name, text in texts.items()
  )


def _curves(run: Run) -> dict[str, dict[str, list[float]]]:
  """Steps and losses: in training, rounded to 1e-4 nats, and in validation."""
  found = {}
  for name in ("loss", "validation_loss"):
    steps, values = run.series(name)
    losses = np.round(values, 4) if name == "loss" else values
    found[name] = {"step": steps.tolist(), "value": losses.tolist()}
  return found


def write(comparison: Comparison, workdir: Path) -> None:
  """Writes ``report.html``, the plots and ``results.json``."""
  images = {}
  for name, plot in plots(comparison).items():
    buffer = io.BytesIO()
    plot.savefig(buffer, format="png", dpi=120)
    images[name] = buffer.getvalue()
    files.write(workdir / f"{name}.png", images[name])
  results = {
    "baseline": comparison.baseline.name,
    "runs": {
      run.name: run.result.to_dict()
      | {"gap_percent": comparison.gap(run), "curves": _curves(run)}
      for run in comparison.runs
    },
    "config": comparison.config,
    "commands": comparison.commands,
    "versions": comparison.versions,
    "seconds": comparison.seconds,
    "processes": comparison.processes,
  }
  files.write(workdir / "results.json", metrics.to_json(results))
  files.write(workdir / "report.html", page(comparison, images))
