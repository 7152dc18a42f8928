"""Trainers of other people's libraries, each right, and with a published fault, as same_numbers/trainers.py has them of
PyTorch's own parts, with the same flags:

    torchrun --nproc_per_node 2 tests/support/trainers_of_libraries.py trainer many/ --fault means
"""

import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))
import same_numbers  # noqa: E402
from same_numbers import trainers  # noqa: E402
from same_numbers.trainers_base import (  # noqa: E402
    LENGTH, Model, Run, adam, mean_loss, rank, sum_gradients, train, world)
from same_numbers.trainers_data import MICRO_BATCHES, accumulate, batches  # noqa: E402


def accelerate(run: Run):
    """Hugging Face's Accelerator.

    twice: the loss is divided by the number of micro-batches, as backward() does, too (huggingface/accelerate#106)
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES // world())
    model = Model(1)
    model, optimizer = accelerator.prepare(model, adam(model))
    recorder = same_numbers.Recorder(model, optimizer, run.folder)
    for step in range(run.steps):
        for _, inputs, targets in batches(step):
            with accelerator.accumulate(model):
                loss = mean_loss(model(inputs), targets)
                accelerator.backward(loss / accelerator.gradient_accumulation_steps if run.fault == "twice" else loss)
                if accelerator.sync_gradients:
                    recorder.step()
                optimizer.step()
                optimizer.zero_grad()
    return []


class WithLoss(Model):
    """As Trainer calls models."""

    def forward(self, input_ids, labels, num_items_in_batch=None, **kwargs):
        losses = F.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": losses / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


def trainer(run: Run):
    """Hugging Face's Trainer, on samples of unlike lengths.

    means: the mean over micro-batches of means over tokens (huggingface/transformers#34191)
    """
    import transformers

    samples = []
    for step in range(run.steps):
        for _, inputs, targets in batches(step, 0, 1):
            for i in range(2):
                labels = targets[i].where(torch.arange(LENGTH) < 2 + (5 * len(samples) + 3) % 11, -100)
                samples.append({"input_ids": inputs[i], "labels": labels})

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(samples)

    args = transformers.TrainingArguments(
        str(run.folder), per_device_train_batch_size=2, gradient_accumulation_steps=MICRO_BATCHES // world(),
        max_steps=run.steps, use_cpu=True, max_grad_norm=0.0, report_to="none", save_strategy="no", disable_tqdm=True,
        learning_rate=1e-2, remove_unused_columns=False)
    running = InOrder(WithLoss(1), args, train_dataset=samples)
    same_numbers.callbacks.record_trainer(running, run.folder)
    running.model_accepts_loss_kwargs = run.fault != "means"
    running.train()
    return []


def lora(run: Run):
    """peft, with frozen weights.

    seeds: each rank draws its own start (pytorch/torchtitan#166)
    """
    import peft

    model = Model(1)
    torch.manual_seed(rank() if run.fault == "seeds" else 1)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up", "q"], init_lora_weights="gaussian"))
    return train(run, model, accumulate(model), lambda: sum_gradients(
        model, lambda name: model.get_parameter(name).requires_grad, world()))


LIBRARIES = {each.__name__: each for each in (accelerate, trainer, lora)}

if __name__ == "__main__":
    trainers.TRAINERS |= LIBRARIES
    trainers.main()
