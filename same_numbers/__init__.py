"""Does a training over many processes compute what one process would? Two recordings, and a verdict that names causes.

    recorder = same_numbers.Recorder(model, optimizer, folder)  # before the loop, on each rank
    recorder.step(batch=input_ids, loss=loss, norm=norm)        # after backward and clipping, before optimizer.step()

    python -m same_numbers one_process/ many_processes/         # or same_numbers.compare(one_process, many_processes)

recorder.py writes (with samples, optimizers, outputs; frameworks: what part of which parameter a rank holds; sketches:
how tensors are compared), recording.py reads. pair.py is two recordings, and a step of both; noise.py what rounding may
do; differences.py and totals.py what is not the same; causes.py and places.py why. verdict.py puts it together. The
package needs torch alone.
"""

from . import callbacks
from .recorder import Recorder
from .recording import Recording
from .sketches import factor, section, sketch
from .verdict import Verdict, compare

__version__ = "0.3.0"
__all__ = ["Recorder", "Recording", "Verdict", "callbacks", "compare", "factor", "section", "sketch"]
