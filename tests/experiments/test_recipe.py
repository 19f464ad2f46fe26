"""Contract: every recipe that has a name trains and validates; what the
configurations compare has names, and sizes as their docstrings say."""

import importlib
from pathlib import Path

import jax
import pytest

from experiments import compare
from experiments import recipe
from experiments import train
import fp4jax
from tests.experiments.helpers import make_config

NIGHTLY = set(recipe.RECIPES) - {
  "nvfp4_sr_activations",  # the forward pass needs a key, in validation too
  "nvfp4_ms_eden",
  "nvfp4_row_scale",
  "nvfp4_rht_fprop",
}


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow if name in NIGHTLY else ())
    for name in recipe.RECIPES
  ],
)
def test_recipes_train_and_validate(name):
  experiment = train.make_experiment(make_config(recipe=name))
  state, batch = experiment.shapes, experiment.batch
  key = jax.eval_shape(lambda: jax.random.key(0))
  after, measured = jax.eval_shape(experiment.train_step, state, batch)
  assert jax.tree.structure(after) == jax.tree.structure(state)
  assert measured["loss"].shape == ()
  jax.eval_shape(experiment.validation_loss.measures, state.params, batch, key)
  assert recipe.RECIPES[name]().name == name


@pytest.mark.parametrize("name", recipe.ABLATIONS)
def test_an_ablation_changes_what_it_names(name):
  parts, fields = recipe.ABLATIONS[name]
  before, after = fp4jax.recipes.nvfp4(), recipe.RECIPES[f"nvfp4_{name}"]()
  named = {side for part in parts for side in fp4jax.recipes.PARTS[part]}
  for side in fp4jax.recipes.PARTS["all"]:
    gemm, hand = side.split(".")
    old, new = (getattr(getattr(r, gemm), hand) for r in (before, after))
    assert (old != new) <= (side in named)
    if side in named:
      assert all(getattr(new, field) == x for field, x in fields.items())


@pytest.mark.parametrize(
  "module, parameters",
  [
    ("transformer", 39_986_048),
    ("hybrid", 33_401_632),
    ("ablations", 33_401_632),
    ("beyond", 33_401_632),
    ("moe", 71_174_944),
  ],
)
def test_what_configurations_compare_can_be_trained(module, parameters):
  config = importlib.import_module(f"configs.{module}").get_config()
  names = compare._names(config)
  assert names[0] == "bf16" and "nvfp4" in names
  for name in names:
    each = compare.variant(config, name, Path("any"))
    experiment = train.make_experiment(each)
    assert train._parameters(experiment) == parameters
    last = experiment.coverage.splitlines()
    (count, *_) = [x for x in last if "linear layers quantised" in x]
    assert count.startswith("0 of") == (name == "bf16")
