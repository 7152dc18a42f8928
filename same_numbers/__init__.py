"""Does a training over many processes compute what one process would? Two recordings, and a verdict that names causes.

    recorder = same_numbers.Recorder(model, optimizer, folder)  # before the loop, on each rank
    recorder.step(batch=input_ids, loss=loss, norm=norm)        # after backward and clipping, before optimizer.step()

    python -m same_numbers one_process/ many_processes/

sketches.py is how tensors are compared, frameworks.py what part of which parameter a rank holds; recorder.py,
outputs.py and recording.py write and read, verdict.py and totals.py compare, causes.py and places.py explain. The
package needs torch alone.
"""

from . import callbacks
from .recorder import Recorder
from .recording import Recording
from .sketches import factor, section, sketch

__version__ = "0.3.0"
__all__ = ["Recorder", "Recording", "callbacks", "factor", "section", "sketch"]
