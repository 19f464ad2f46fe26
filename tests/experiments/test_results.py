"""Contract: docs/results.md holds what was measured, and nothing typed.

Every figure comes from the comparisons in docs/results; the page that is
committed is the one that they give.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import errors
from experiments import results

ROOT = Path(__file__).parents[2]


def _run(loss, curve, **fields):
  return {
    "validation_loss": loss,
    "residual_bytes": {"uint8": 1_500_000, "bfloat16": 500_000},
    "peak_bytes": 2_000_000_000,
    "skipped_steps": 0,
    "seconds": 12.4,
    "parameters": 1000,
    "steps": len(curve),
    "tokens": 50 * len(curve),
    "unigram_entropy": 6.5,
    "curves": {"loss": {"value": curve}},
  } | fields


def _write(folder: Path, seed: int, runs: dict) -> None:
  content = {
    "baseline": "bf16",
    "runs": runs,
    "config": {"seed": seed, "data": {"sequence": 8}},
    "commands": [f"python -m experiments.compare --config.seed={seed}"],
    "versions": {"device": "1 x CPU", "jax": "1.2", "commit": "abc"},
    "processes": 2,
  }
  path = folder / f"small-{seed}.json"
  path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
  plain, higher = [4.0, 2.0, 1.0, 1.0], [4.0, 2.2, 1.1, 1.1]
  runs = {"bf16": _run(2.0, plain), "nvfp4": _run(2.02, higher)}
  _write(tmp_path, 0, runs | {"mxfp4": _run(None, higher)})
  _write(tmp_path, 1, {"bf16": _run(4.0, plain), "nvfp4": _run(4.12, higher)})
  return tmp_path


def test_gaps_are_of_the_same_seed(folder):
  seeds = results.load(folder)["small"]
  assert seeds.seeds == (0, 1)
  assert seeds.gaps("nvfp4") == pytest.approx({0: 1.0, 1: 3.0})
  assert seeds.gaps("bf16", "nvfp4")[0] == pytest.approx(100 * (2 / 2.02 - 1))
  assert np.isnan(seeds.gaps("mxfp4")[0]) and list(seeds.gaps("mxfp4")) == [0]


def test_calls_become_figures(folder):
  text = (
    "{{loss small nvfp4}} {{gap small nvfp4}} {{spread small nvfp4}}"
    " {{gap small bf16 nvfp4}}"
  )
  got = results.render(text, results.load(folder))
  assert got == "3.0700 +2.00 % 2.00 -1.95 %"


def test_table_and_facts(folder):
  seeds = results.load(folder)["small"]
  rows = results.table(seeds).splitlines()
  assert rows[0].startswith("| run | validation loss (seed 0, 1) |")
  assert rows[2].startswith("| `bf16` | 2.0000, 4.0000 | +0.00, +0.00 |")
  assert rows[3] == (
    "| `nvfp4` | 2.0200, 4.1200 | +1.00, +3.00 | +2.00 | 2 | 2.0 | 0, 0 |"
    " 12, 12 |"
  )
  assert rows[4].startswith("| `mxfp4` | not finite | not finite |")
  facts = results.facts(seeds)
  for part in (
    "1,000 parameters; 4 steps of 50 tokens",
    "0.20 a parameter",
    "1 x CPU, JAX 1.2, commit abc, 2 runs at a time",
    "--config.seed=1",
  ):
    assert part in facts


def test_plot_is_the_gap_step_by_step(folder):
  (axes,) = results.plot(results.load(folder)["small"]).axes
  line = next(x for x in axes.lines if x.get_label() == "nvfp4")
  np.testing.assert_allclose(line.get_ydata(), [0, 10, 10, 10])
  assert line.get_xdata().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
  "text, words",
  [
    ("{{gap other nvfp4}}", "there are results of small"),
    ("{{gap small fp8}}", "has no run 'fp8'; it has bf16, nvfp4, mxfp4"),
    ("{{median small bf16}}", "is no call"),
    ("{{table small bf16}}", "is no call"),
  ],
)
def test_what_was_not_measured_cannot_be_said(folder, text, words):
  with pytest.raises(errors.UserError, match=words):
    results.render(text, results.load(folder))


@pytest.mark.parametrize("name", ["small.json", "small-2.json"])
def test_a_misnamed_file_is_refused(folder, name):
  (folder / "small-1.json").rename(folder / name)
  with pytest.raises(errors.UserError, match="rename it"):
    results.load(folder)


def test_the_page_is_written(folder):
  (folder / "template.md").write_text("# R\n\n{{plot small}}\n{{table small}}")
  output = folder.parent / "results.md"
  results.write(folder, output)
  assert "| `nvfp4` |" in output.read_text()
  assert (folder / "small.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_page_is_that_of_the_committed_results():
  folder = ROOT / "docs/results"
  if not folder.exists():
    pytest.skip("there are no results yet")
  text = (folder / "template.md").read_text()
  expected = results.render(text, results.load(folder))
  assert (ROOT / "docs/results.md").read_text() == expected
