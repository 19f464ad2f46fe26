"""Checkpoints: state, data iterator and plain metadata, whole or not at all."""

import errno
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from experiments import errors
from experiments.state import State


class Checkpoints:
  """The checkpoints of one run, the newest few of them."""

  def __init__(self, folder: Path, keep: int):
    self._folder = folder
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=False
      ),
    )

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._manager.close()

  @property
  def latest(self) -> int | None:
    """The step of the newest checkpoint."""
    return self._manager.latest_step()

  def outlook(self) -> str:
    """What is saved, and how a run that stops now goes on, for messages."""
    # Read anew: the manager counts a checkpoint whose saving was interrupted.
    steps = self._manager.all_steps(read=True)
    if not steps:
      return "no checkpoint is saved yet: the same command starts again."
    return (
      f"the checkpoint of step {max(steps)} is saved in {self._folder}: the"
      " same command continues from it."
    )

  def save(self, state: State, batches: Any, metadata: dict) -> None:
    """Saves after a step, unless that step is saved.

    Args:
      state: the state; only arrays of numbers, no PRNG keys.
      batches: grain's iterator.
      metadata: plain values.
    """
    step = int(state.step)
    if step == self.latest:
      return
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(state._asdict()),
      batches=grain.checkpoint.CheckpointSave(batches),
      metadata=ocp.args.JsonSave(metadata),
    )
    try:
      self._manager.save(step, args=items)
    except (OSError, RuntimeError, ValueError) as error:
      if not _disk_is_full(error):
        raise
      raise errors.UserError(
        f"{self._folder}: no space left for the checkpoint of step {step};"
        " free some and run the same command again, which continues from"
        f" step {self.latest or 0}."
      ) from error

  def restore(self, like: Any, batches: Any) -> tuple[State, dict]:
    """The newest checkpoint; ``batches`` continues where it was.

    Args:
      like: a state of ``jax.ShapeDtypeStruct``.
      batches: grain's iterator, which is moved.

    Returns:
      The state, and the metadata.
    """
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      like._asdict(),
    )
    restored = self._manager.restore(
      self.latest,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(target),
        batches=grain.checkpoint.CheckpointRestore(batches),
        metadata=ocp.args.JsonRestore(),
      ),
    )
    return State(**restored.state), restored.metadata


def steps(folder: Path) -> list[int]:
  """The steps of a run's checkpoints, in order."""
  if not folder.is_dir():
    return []
  with _reader(folder) as manager:
    return sorted(manager.all_steps())


def restore_params(folder: Path, step: int, like: Any) -> Any:
  """The parameters of one checkpoint alone.

  Args:
    folder: of the checkpoints.
    step: one of ``steps``.
    like: tree of ``jax.ShapeDtypeStruct``.

  Returns:
    The parameters, on one device.
  """
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  target = {
    "params": jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like
    )
  }
  arguments = ocp.args.PyTreeRestore(
    item=target,
    restore_args=ocp.checkpoint_utils.construct_restore_args(target),
    partial_restore=True,  # the optimizer's moments stay on disk
  )
  with _reader(folder) as manager:
    restored = manager.restore(step, args=ocp.args.Composite(state=arguments))
  return restored.state["params"]


def _reader(folder: Path) -> ocp.CheckpointManager:
  options = ocp.CheckpointManagerOptions(
    read_only=True, create=False, save_interval_steps=0
  )
  return ocp.CheckpointManager(folder.absolute(), options=options)


def _disk_is_full(error: Exception) -> bool:
  if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
    return True
  return "No space left on device" in str(error)
