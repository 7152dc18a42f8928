"""A Recorder for trainers whose loop is not yours: Hugging Face's Trainer and Lightning's.

    same_numbers.callbacks.record_trainer(trainer, "many")                           # before trainer.train()
    lightning.Trainer(..., callbacks=[same_numbers.callbacks.lightning("many")])

Both record the loss of a step and the norm of its gradients before clipping, which the callbacks of these libraries are
not given. The libraries are imported when they are asked for. Further arguments are those of Recorder.
"""

import contextlib
import functools

import torch

from .recorder import Recorder


def record_trainer(trainer, folder, **options) -> None:
    """Records a transformers.Trainer, or one that is derived from it, as trl's are.

    Its `training_step` returns the loss of a micro-batch, and its accelerator's `clip_grad_norm_` the norm: both are
    wrapped, for this trainer only. Without clipping (`max_grad_norm=0`) no norm is recorded.
    """
    from transformers import TrainerCallback

    losses, norms = noted(trainer, "training_step"), noted(trainer.accelerator, "clip_grad_norm_")

    class Record(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.recorder = Recorder(model, optimizer, folder, **options)

        def on_pre_optimizer_step(self, *args, **kwargs):
            self.recorder.step(loss=sum(losses) if losses else None, norm=norms[-1] if norms else None)
            losses.clear(), norms.clear()

        def on_train_end(self, *args, **kwargs):
            self.recorder.close()

    trainer.add_callback(Record())


def noted(thing, name: str) -> list:
    """What this object's method will have returned, call by call."""
    method, found = getattr(thing, name), []

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        found.append(method(*args, **kwargs))
        return found[-1]

    setattr(thing, name, wrapped)
    return found


def lightning(folder, **options):
    """A callback for lightning.pytorch.Trainer with automatic optimization, in both runs.

    The samples are those of the batches that `training_step` gets, whether it calls `forward` or not. Of a model with
    DTensors of several meshes no norm is recorded.
    """
    from lightning.pytorch import Callback

    class Record(Callback):
        def on_train_start(self, trainer, module):
            self.recorder, self.losses, self.batches = Recorder(module, trainer.optimizers, folder, **options), [], []
            clip = module.configure_gradient_clipping

            def clip_and_record(optimizer, *args, **kwargs):
                norm = norm_of(module) if self.recorder.next <= self.recorder.last else None
                clip(optimizer, *args, **kwargs)
                self.recorder.step(batch=self.batches, loss=sum(self.losses), norm=norm)
                self.losses, self.batches = [], []

            module.configure_gradient_clipping = clip_and_record

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.batches.append(batch)

        def on_before_backward(self, trainer, module, loss):  # of a micro-batch, divided by their number
            self.losses.append(loss.detach())

        def on_train_end(self, trainer, module):
            self.recorder.close()
            vars(module).pop("configure_gradient_clipping", None)  # the class has it again

    return Record()


def norm_of(module) -> torch.Tensor | None:
    with contextlib.suppress(RuntimeError, ValueError):  # no norm of several meshes together
        return torch.nn.utils.get_total_norm([param.grad for param in module.parameters() if param.grad is not None])
    return None
