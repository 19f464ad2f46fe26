"""Contract: healing trains the last steps in BF16, and nothing before changes.

One recompilation; a run that is interrupted before or after the switch goes on
as if it had not been.
"""

import jax
import pytest

from experiments import errors
from experiments import metrics
from experiments import recipe
from experiments import train
import fp4jax
from tests.experiments.helpers import losses
from tests.experiments.helpers import make_config


def make_healed(**fields):
  return make_config(recipe="nvfp4", policy__heal__fraction=0.3, **fields)


def test_phases_are_those_of_the_schedule():
  config = make_healed()
  (start, policy), (switch, healed) = recipe.make_phases(config)
  assert (start, switch) == (0, 7)
  assert policy == recipe.make_policy(config)
  assert healed == fp4jax.policies.healed(policy)
  config.policy.heal.gemms = "forward"
  forward = recipe.make_phases(config)[1][1].default
  assert forward.fprop is None and forward.wgrad == policy.default.wgrad
  config.policy.heal.gemms = "backward"
  backward = recipe.make_phases(config)[1][1].default
  assert backward.fprop == policy.default.fprop
  assert backward.dgrad is None and backward.wgrad is None
  config.policy.heal.fraction = 0.0
  assert recipe.make_phases(config) == ((0, policy),)
  config.policy.heal.fraction = 0.001
  assert recipe.make_phases(config)[1][0] == 9


@pytest.mark.parametrize(
  "fields",
  [{"recipe": "none"}, {"recipe": "bf16"}, {"policy__name": "bf16"}],
)
def test_what_quantises_nothing_has_nothing_to_heal(fields):
  config = make_healed()
  config.update_from_flattened_dict(
    {name.replace("__", "."): value for name, value in fields.items()}
  )
  with pytest.raises(errors.UserError, match="set it to 0.0"):
    train.make_experiment(config)


def test_other_gemms_are_refused():
  with pytest.raises(errors.UserError, match="both, forward, backward"):
    train.make_experiment(make_healed(policy__heal__gemms="fprop"))


def test_healed_run(compared, cache, tmp_path):
  """Seven steps as unhealed; the rest is BF16's step from there."""
  config = make_healed(data__cache=cache)
  result = train.run(config, tmp_path / "whole")
  unhealed = losses(compared.workdir / "runs" / "nvfp4")
  healed = losses(tmp_path / "whole")
  assert healed[:7] == unhealed[:7]
  assert all(a != b for a, b in zip(healed[7:], unhealed[7:], strict=True))
  table, after = result.coverage.split("\n\nfrom step 7 on:\n")
  assert table == compared.comparison.runs[2].result.coverage
  assert after.splitlines()[-1].startswith("0 of ")


@pytest.mark.slow  # nightly: four steps compile
def test_the_healed_step_is_the_models_own():
  config = make_healed()
  experiment = train.make_experiment(config)
  plain = train.make_experiment(make_config(recipe="none"))
  assert experiment.at(6) is experiment.phases[0]
  assert experiment.at(7) is experiment.phases[1]
  state = jax.jit(experiment.initialise)()
  tokens = jax.random.randint(
    jax.random.key(0), experiment.tokens.shape, 0, config.data.vocab
  )
  got, _ = jax.jit(experiment.at(7).train_step)(state, tokens)
  expected, _ = jax.jit(plain.train_step)(state, tokens)
  other, _ = jax.jit(experiment.train_step)(state, tokens)
  equal = lambda a, b: jax.tree.all(
    jax.tree.map(lambda x, y: bool((x == y).all()), a.params, b.params)
  )
  assert equal(got, expected) and not equal(other, expected)


@pytest.mark.slow  # nightly
@pytest.mark.parametrize("stop", [5, 9])
def test_interrupted_before_and_after_the_switch(cache, tmp_path, stop):
  config = make_healed(data__cache=cache, train__checkpoint_every=2)
  train.run(config, tmp_path / "whole")
  written = metrics.Writer.write

  def write(self, records):
    written(self, records)
    if any(record["step"] >= stop for record in records):
      raise KeyboardInterrupt

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(metrics.Writer, "write", write)
    with pytest.raises(errors.Stopped):
      train.run(config, tmp_path / "part")
  train.run(config, tmp_path / "part")
  assert losses(tmp_path / "part") == losses(tmp_path / "whole")
