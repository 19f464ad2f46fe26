"""Contract: recipes are compared on equal terms, and the report says it all.

Same data, order and initialisation; gaps as defined; one HTML file that loads
nothing; finished runs are not repeated.
"""

import base64
import dataclasses
import html
import json
import math
import re

import numpy as np
import pytest

from experiments import compare
from experiments import config as config_lib
from experiments import errors
from experiments import metrics
from experiments import report
from experiments import train
from tests.experiments.helpers import losses
from tests.experiments.helpers import make_config

RECIPES = ("none", "bf16", "nvfp4")


def test_bf16_policy_is_bit_identical_to_the_unquantised_model(compared):
  plain, policy, nvfp4 = (
    losses(compared.workdir / "runs" / name) for name in RECIPES
  )
  assert plain == policy
  assert len(plain) == 10
  assert nvfp4[0][1] != plain[0][1]


def test_nvfp4_is_close_and_learns(compared):
  for run in compared.comparison.runs:
    _, values = run.series("loss")
    assert values[-1] < values[0] < math.log(320) + 0.1
  assert 0 < abs(compared.comparison.gap(compared.comparison.runs[2])) < 3


def test_results_are_those_of_the_runs(compared):
  results = json.loads((compared.workdir / "results.json").read_text())
  assert list(results["runs"]) == list(RECIPES)
  assert results["baseline"] == "none"
  base = results["runs"]["none"]["validation_loss"]
  for name, run in results["runs"].items():
    expected = 100 * (run["validation_loss"] / base - 1)
    assert run["gap_percent"] == pytest.approx(expected, abs=1e-9)
    folder = compared.workdir / "runs" / name
    records = metrics.read(folder / "metrics.jsonl")
    (last,) = [r for r in records if r["step"] == 10 and "validation_loss" in r]
    assert run["validation_loss"] == last["validation_loss"]
    assert run["tokens"] == 10 * 4 * 32
    assert run["unigram_entropy"] > 3
  assert results["runs"]["bf16"]["gap_percent"] == 0.0
  assert set(results["versions"]) >= {"jax", "fp4jax", "device"}


def test_nvfp4_keeps_packed_residuals(compared):
  kept = [run.result.residual_bytes for run in compared.comparison.runs]
  assert kept[0] == kept[1]
  assert "uint8" not in kept[0] and kept[2]["uint8"] > 0
  assert kept[2]["bfloat16"] < kept[0]["bfloat16"]


def test_report_is_one_file_that_loads_nothing(compared):
  page = (compared.workdir / "report.html").read_text()
  sources = re.findall(r'(?:src|href)="([^"]*)"', page)
  assert len(sources) == 4
  for name, source in zip(
    report.plots(compared.comparison), sources, strict=True
  ):
    kind, content = source.split(",", 1)
    assert kind == "data:image/png;base64"
    image = base64.b64decode(content)
    assert image.startswith(b"\x89PNG")
    assert image == (compared.workdir / f"{name}.png").read_bytes()
    page = page.replace(source, "")  # four letters may mean anything there
  assert "http" not in page and "<script" not in page and "$" not in page
  for run in compared.comparison.runs:
    assert f"{run.result.validation_loss:.4f}" in page
  assert "params/blocks/ffn/up/kernel" in page
  captions = report.captions(compared.comparison)
  assert list(captions) == list(report.plots(compared.comparison))
  for text in (*captions.values(), report.verdict(compared.comparison)):
    assert html.escape(text) in page
  assert "&#x27;--workdir=A B&#x27;" in page
  for name, version in config_lib.versions().items():
    assert f"{name} {version}" in page


def test_commands_reproduce_the_comparison_and_each_run(compared):
  commands = compared.comparison.commands
  assert commands[0] == (
    "python -m experiments.compare --config=configs/tiny.py"
    " --config.seed=0 '--workdir=A B'"
  )
  assert commands[3].startswith(
    "python -m experiments.train --config=configs/tiny.py --config.seed=0"
    " --config.recipe=nvfp4 --workdir="
  )
  assert len(commands) == 4


def test_plots_show_the_numbers(compared):
  plots = report.plots(compared.comparison)
  (axes,) = plots["loss"].axes
  curve = next(line for line in axes.lines if line.get_label() == "nvfp4")
  run = compared.comparison.runs[2]
  np.testing.assert_allclose(curve.get_ydata(), run.series("loss")[1])
  (axes,) = plots["gap"].axes
  flat = next(line for line in axes.lines if line.get_label() == "bf16")
  np.testing.assert_array_equal(flat.get_ydata(), 0.0)
  (axes,) = plots["speed"].axes
  assert [bar.get_height() for bar in axes.patches] == [
    run.result.tokens_per_second for run in compared.comparison.runs
  ]
  (axes,) = plots["memory"].axes
  total = sum(bar.get_height() for bar in axes.patches)
  kept = [run.result.residual_bytes for run in compared.comparison.runs]
  assert total * 1e6 == pytest.approx(sum(sum(k.values()) for k in kept))


def test_coverage_comes_before_step_0_and_progress_in_plain_lines(compared):
  """Of each run one line, which names the file of the table."""
  lines = compared.output.splitlines()
  for run in compared.comparison.runs:
    name, table = run.result.recipe, run.result.coverage.splitlines()
    count = [line for line in table if not line.startswith("backend ")][-1]
    mine = [i for i, line in enumerate(lines) if line.startswith(f"{name}: ")]
    steps = [i for i in mine if f"{name}: step " in lines[i]]
    assert len(steps) == 8  # 5 of 2 steps each, cut at 5; 2 validations
    assert "tokens/s" in lines[steps[0]] and "left" in lines[steps[0]]
    assert "loss" in lines[steps[0]]
    path = compared.workdir / "runs" / name / "coverage.txt"
    assert lines[mine[0] : steps[0]].count(f"{count}: {path}") == 1
    assert path.read_text() == f"{run.result.coverage}\n"
  assert "fprop" not in compared.output


def test_summary_says_how_it_ended(compared):
  text = report.summary(compared.comparison)
  run = compared.comparison.runs[2]
  for part in (
    f"{run.result.validation_loss:.4f}",
    f"{compared.comparison.gap(run):+.2f}",
    f"{run.result.unigram_entropy:.4f}",
    run.result.coverage,
    run.result.sample,
  ):
    assert part in text
  emulated = "emulated, so this is not the speed of FP4 hardware"
  assert emulated in text.partition("tokens/s")[2]
  assert emulated in (compared.workdir / "report.html").read_text()


def test_verdict_gives_the_gaps_and_what_one_seed_cannot_tell(compared):
  plain, _, nvfp4 = compared.comparison.runs
  text = report.verdict(compared.comparison)
  assert f"none {plain.result.validation_loss:.4f}, bf16" in text
  gap = compared.comparison.gap(nvfp4)
  assert f"nvfp4 {nvfp4.result.validation_loss:.4f} ({gap:+.2f} %)" in text
  assert "not known from one seed (0)" in text
  assert text in report.summary(compared.comparison)
  alone = dataclasses.replace(compared.comparison, runs=(plain,))
  assert "seed" not in report.verdict(alone)


def test_axes_say_what_and_in_which_unit(compared):
  plots = report.plots(compared.comparison)
  units = {"loss": "nats", "gap": "%", "memory": "MB (1e6", "speed": "tokens/s"}
  for name, unit in units.items():
    (axes,) = plots[name].axes
    assert unit in axes.get_ylabel() and axes.get_xlabel()
    assert axes.get_legend() or name == "speed"


def test_finished_runs_are_not_repeated(compared, monkeypatch):
  monkeypatch.setattr(train, "_train", None)  # would raise
  again = compare.run(compared.config, compared.workdir)
  assert [run.result for run in again.runs] == [
    run.result for run in compared.comparison.runs
  ]


def test_names_are_separated_by_commas():
  for recipes in ("bf16,mxfp8", " bf16, mxfp8"):
    config = make_config(compare__recipes=recipes)
    assert compare._names(config) == ("bf16", "mxfp8")
  config = make_config(compare__recipes="bf16,fp3")
  with pytest.raises(
    errors.UserError, match="config.compare.recipes='bf16,fp3'.*none, bf16"
  ):
    compare._names(config)


@pytest.mark.parametrize("recipes", ["", "bf16,bf16", "bf16,fp3", "bf16,"])
def test_bad_recipes_are_refused_before_any_run(tmp_path, recipes):
  with pytest.raises(errors.UserError, match="needed"):
    compare.run(make_config(compare__recipes=recipes), tmp_path / "new")
  assert not (tmp_path / "new").exists()


def test_a_variant_differs_in_the_fields_that_it_names(tmp_path):
  config = make_config()
  name = "nvfp4+policy.last=0+optimizer.peak_lr=1+data.path=a b"
  got = compare.variant(config, name, tmp_path)
  assert got.recipe == "nvfp4" and got.policy.last == 0
  assert got.optimizer.peak_lr == 1.0 and got.data.path == "a b"
  expected = config.copy_and_resolve_references().unlock()
  expected.update_from_flattened_dict(
    {
      "recipe": "nvfp4",
      "policy.last": 0,
      "optimizer.peak_lr": 1.0,
      "data.path": "a b",
      "data.cache": str(tmp_path / "data"),
    }
  )
  assert got == expected.lock()
  assert config.policy.last == 1


@pytest.mark.parametrize(
  "name, words",
  [
    ("nvfp4+policy.lst=0", "'policy.lst', which is no field of a run"),
    ("nvfp4+compare.processes=1", "no field of a run"),
    ("nvfp4+policy.last", "needed a int, as 1"),
    ("nvfp4+policy.last=0.5", "needed a int, as 1"),
    ("nvfp4+model.scan=1", "needed a bool, as True"),
  ],
)
def test_a_variant_of_no_field_is_refused(tmp_path, name, words):
  with pytest.raises(errors.UserError, match=words):
    compare.variant(make_config(), name, tmp_path)


@pytest.mark.slow  # nightly: two processes compile
def test_runs_in_processes_are_the_same_runs(cache, tmp_path):
  """Side by side, each in its own process."""
  config = make_config(
    data__cache=cache,
    train__steps=2,
    compare__recipes="none,none+seed=1",
    compare__processes=2,
  )
  comparison = compare.run(config, tmp_path / "processes")
  assert "shared by 2 runs at a time" in report.summary(comparison)
  config.compare.processes = 0
  compare.run(config, tmp_path / "here")
  for run in comparison.runs:
    found = [
      losses(tmp_path / folder / "runs" / run.name)
      for folder in ("processes", "here")
    ]
    assert found[0] == found[1] and len(found[0]) == 2


@pytest.mark.slow  # nightly: what one process raises is raised
def test_errors_of_processes(cache, tmp_path):
  config = make_config(
    data__cache=cache,
    train__max_skips=1,
    optimizer__peak_lr=1e30,
    compare__recipes="none,bf16,none+seed=1",
    compare__processes=1,
  )
  with pytest.raises(errors.UserError, match="not finite"):
    compare.run(config, tmp_path)
  assert not (tmp_path / "runs" / "none+seed=1").exists()


def test_gap_and_smoothing_bear_steps_that_are_not_finite():
  values = np.array([2.0, np.nan, 4.0, np.inf, 6.0])
  np.testing.assert_array_equal(report.smooth(values, 1)[[0, 2, 4]], [2, 4, 6])
  np.testing.assert_array_equal(report.smooth(values, 3)[2:], [3, 4, 5])
