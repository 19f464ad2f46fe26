"""Policies by step: which recipe trains a model when."""

from collections.abc import Iterable
import dataclasses

from fp4jax import errors
from fp4jax.policy import Policy


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The policy of every step of a run, as a plain Python value.

  A policy decides what is compiled, so each switch compiles the step once more;
  nothing is decided inside of a compiled step.

  Attributes:
    phases: pairs of the step at which a policy begins and the policy, ascending
      from step 0.

  Raises:
    ValueError: no pairs, steps that do not ascend from 0, or other types.

  >>> from fp4jax import policies
  >>> policy = policies.nemotron()
  >>> schedule = Schedule(((0, policy), (8200, policies.healed(policy))))
  >>> schedule.at(8199) == policy, schedule.at(8200) == policy
  (True, False)
  >>> schedule.switches
  (8200,)
  """

  phases: tuple[tuple[int, Policy], ...]

  def __post_init__(self):
    if not isinstance(self.phases, Iterable) or not (
      phases := tuple(self.phases)
    ):
      raise ValueError(
        f"Schedule: phases={errors.shown(self.phases)} holds no (step, policy);"
        " write Schedule(((0, policy), (8200, healed)))."
      )
    for phase in phases:
      pair = isinstance(phase, (tuple, list)) and len(phase) == 2
      if not pair or not errors.is_integer(phase[0]):
        raise ValueError(
          f"Schedule: {errors.shown(phase)} is no pair of an integer step and a"
          " policy; write Schedule(((0, policy), (8200, healed)))."
        )
      if not isinstance(phase[1], Policy):
        raise ValueError(
          f"Schedule: step {phase[0]} has {errors.shown(phase[1])}, needed a"
          " Policy; call one of fp4jax.policies."
        )
    steps = [int(step) for step, _ in phases]
    if steps[0] != 0:
      raise ValueError(
        f"Schedule: the first step is {steps[0]}, needed 0; give the policy"
        " that the run begins with."
      )
    for before, after in zip(steps, steps[1:], strict=False):
      if after <= before:
        raise ValueError(
          f"Schedule: step {after} comes after step {before}, needed steps that"
          " ascend; sort the pairs, and give one policy for a step."
        )
    policies = (policy for _, policy in phases)
    phases = tuple(zip(steps, policies, strict=True))
    object.__setattr__(self, "phases", phases)

  @property
  def switches(self) -> tuple[int, ...]:
    """The steps at which the policy becomes another."""
    return tuple(
      step
      for (_, before), (step, after) in zip(
        self.phases, self.phases[1:], strict=False
      )
      if before != after
    )

  def at(self, step: int) -> Policy:
    """The policy of a step.

    Args:
      step: steps taken before this one, a Python integer.

    Raises:
      ValueError: ``step`` is negative or no Python integer: an array, or a
        value that ``jax.jit`` traces.
    """
    if not errors.is_integer(step) or step < 0:
      raise ValueError(
        f"Schedule.at: step={errors.shown(step)}, needed a Python int of 0 or"
        " more; call it outside of jax.jit, with int(step), and pass the policy"
        " as a static argument."
      )
    return [policy for first, policy in self.phases if first <= step][-1]

  def __str__(self):
    """Every phase, in a line each."""
    return "\n".join(f"from step {n}: {policy}" for n, policy in self.phases)
