"""Metrics of a run: JSONL, TensorBoard, and what the user sees meanwhile."""

from collections.abc import Iterable
import json
import math
import os
from pathlib import Path
import time

from rich import console as rich_console
from rich import progress as rich_progress
from tensorboardX import event_file_writer
from tensorboardX import summary
from tensorboardX.proto import event_pb2

from experiments import files


def read(path: Path) -> list[dict]:
  """The records of a JSONL file; a torn last line, of a kill, is left out."""
  if not path.exists():
    return []
  records = []
  for line in path.read_text().splitlines():
    try:
      records.append(json.loads(line))
    except json.JSONDecodeError:
      break
  return records


def to_json(content: dict) -> str:
  """JSON, in which null is what is not finite."""

  def plain(value):
    if isinstance(value, dict):
      return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
      return [plain(inner) for inner in value]
    infinite = isinstance(value, float) and not math.isfinite(value)
    return None if infinite else value

  return json.dumps(plain(content), indent=2) + "\n"


def from_json(text: str) -> dict:
  """What ``to_json`` wrote, with NaN for null."""
  content = json.loads(text)
  return {k: math.nan if v is None else v for k, v in content.items()}


def shown(value: float, form: str) -> str:
  """A number for people, who are told where there is none.

  >>> shown(1.23456, ".2f"), shown(math.nan, ".2f")
  ('1.23', 'not finite')
  """
  return f"{value:{form}}" if math.isfinite(value) else "not finite"


class Writer:
  """Appends to ``metrics.jsonl`` and to TensorBoard's event files."""

  def __init__(self, workdir: Path, step: int):
    """Opens both; records after ``step``, of a killed run, are dropped."""
    path, board = workdir / "metrics.jsonl", workdir / "tensorboard"
    kept = [record for record in read(path) if record["step"] <= step]
    files.write(path, "".join(json.dumps(record) + "\n" for record in kept))
    board.mkdir(exist_ok=True)
    self._file = path.open("a")
    # Not a SummaryWriter: its thread outlives errors such as a full disk.
    self._board = event_file_writer.EventsWriter(str(board / "events"))
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._event(step + 1, session_log=start)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._file.close()
    self._board.close()

  def write(self, records: Iterable[dict]) -> None:
    """Appends records, each with its ``step``; null is what is not finite."""
    for record in records:
      finite = {k: v if math.isfinite(v) else None for k, v in record.items()}
      self._file.write(json.dumps(finite) + "\n")
      for name, value in record.items():
        if name != "step":
          self._event(record["step"], summary=summary.scalar(name, value))
    self._file.flush()
    os.fsync(self._file.fileno())
    self._board.flush()

  def _event(self, step: int, **content) -> None:
    self._board.write_event(
      event_pb2.Event(wall_time=time.time(), step=step, **content)
    )


class Progress:
  """A bar on a terminal, plain lines elsewhere."""

  def __init__(self, name: str, step: int, steps: int):
    self._name = name
    self._steps = steps
    self._bar = rich_progress.Progress(
      "{task.description}",
      rich_progress.BarColumn(),
      "{task.completed}/{task.total}",
      "{task.fields[status]}",
      rich_progress.TimeRemainingColumn(),
      disable=not rich_console.Console().is_terminal,
    )
    self._task = self._bar.add_task(
      name, total=steps, completed=step, status=""
    )

  def __enter__(self):
    self._bar.start()
    return self

  def __exit__(self, *exception):
    self._bar.stop()

  def say(self, line: str) -> None:
    """A line above the bar."""
    self._bar.console.print(
      f"{self._name}: {line}", markup=False, highlight=False, soft_wrap=True
    )

  def update(self, step: int, loss: float, rate: float, left: float) -> None:
    """How far it is: loss in nats, tokens/s, seconds left."""
    status = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
    self._bar.update(self._task, completed=step, status=status)
    if self._bar.disable:
      minutes, seconds = divmod(round(left), 60)
      line = f"step {step}/{self._steps}  {status}"
      self.say(f"{line}  {minutes}:{seconds:02} left")
