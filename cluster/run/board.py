"""What one sees of a run while it trains: its curves in TensorBoard, and a bar on a terminal.

TensorBoard's files lie beside metrics.jsonl, on each disk that has one. Each step is one event in them. A run that goes
on adds a file: its curves go on after the step that it goes on from, and what an earlier start has recorded of later
steps is hidden. On a disk that has no curves of the earlier steps, these are taken from metrics.jsonl.

On a terminal one line is drawn anew while a step is computed; elsewhere each step has a line, RunLogger's:

    step 12/60 |####                | loss 3.4211 | evaluation 3.5120 | 214 tokens/s | 03:12 left
"""

import contextlib
import glob
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterable

from tqdm import tqdm

BAR = "step {n_fmt}/{total_fmt} |{bar:20}| {desc}{remaining} left"  # as tqdm fills it in
KEPT = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "evaluation_loss", "perplexity")  # of old rows


class Board:
    """TensorBoard's files in `folder`, for a run that goes on after step `start`.

    `rows`: lines of JSON about the steps before. Where tensorboard is missing or the disk does not take an event, this
    says so once and writes no more: metrics.jsonl has the losses.
    """

    def __init__(self, folder: str, start: int, rows: Iterable[str]):
        self.folder, self.start, self.rows, self.records, self.has_ended = folder, start, rows, None, False

    def open(self) -> None:
        """At the first event, since an older run's folder of that name was renamed before."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        stem = os.path.join(self.folder, "events.out.tfevents.")
        has_curves = bool(glob.glob(f"{glob.escape(stem)}*"))
        self.records = RecordWriter(open(f"{stem}{time.time_ns()}.{socket.gethostname()}.{os.getpid()}", "wb"))
        self.write(file_version="brain.Event:2")
        self.write(step=self.start and self.start + 1, session_log=SessionLog(status=SessionLog.START))
        for row in () if has_curves else map(json.loads, self.rows):
            self.write_values(row["step"], {name: row[name] for name in KEPT if name in row})
        self.rows = ()

    def write(self, **fields) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write_values(self, step: int, values: dict[str, float | str]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import scalar, text

        parts = [(text if isinstance(value, str) else scalar)(name, value) for name, value in values.items()]
        self.write(step=step, summary=Summary(value=[each for part in parts for each in part.value]))

    def add(self, step: int, values: dict[str, float | str]) -> None:
        """Numbers and texts, by name, after optimizer step `step`."""
        if self.has_ended:
            return
        try:
            if self.records is None:
                self.open()
            self.write_values(step, values)
            self.records.flush()
        except (ImportError, OSError) as error:
            remedy = "pip install tensorboard" if isinstance(error, ImportError) else "make room, and start anew"
            print(f"no more curves for TensorBoard ({error}): {remedy}. metrics.jsonl has the losses", flush=True)
            self.close()

    def close(self) -> None:
        self.has_ended = True
        with contextlib.suppress(OSError):  # of a full disk, of which add() has told
            if self.records:
                self.records.close()


class Bar:
    """How far a run is, on the terminal of the rank that logs. It is there between begin() and end()."""

    def __init__(self, is_logging_rank: bool, start: int, num_steps: int):
        has_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.is_shown = is_logging_rank and has_terminal and start < num_steps
        self.words = {"loss": "", "evaluation": "", "speed": ""}
        self.tqdm = tqdm(total=num_steps, initial=start, bar_format=BAR, file=sys.stdout, ascii=" #",
                         disable=not self.is_shown, dynamic_ncols=True)
        self.tqdm.clear()

    def begin(self) -> None:
        """Draws it. Until end() nothing should be printed."""
        self.tqdm.refresh()

    def end(self, step: int) -> contextlib.AbstractContextManager:
        """Takes it away, and after it what is printed inside of the context that it returns, the line of a step."""
        if not self.is_shown:
            return contextlib.nullcontext()
        self.tqdm.clear()
        self.tqdm.n = step
        return contextlib.redirect_stdout(io.StringIO())

    def tell(self, **words: str) -> None:
        """What it says besides: of the `loss`, the last `evaluation` and the `speed`."""
        self.words.update(words)
        self.tqdm.set_description_str("".join(f"{each} | " for each in self.words.values() if each), refresh=False)

    def close(self, stays: bool) -> None:
        """For good. `stays`: its last line is left on the terminal."""
        self.tqdm.leave = stays
        self.tqdm.close()
