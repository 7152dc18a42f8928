"""transformers' Trainer, over DDP and FSDP2, on texts of unlike lengths, with what its arguments offer."""

from of_transformers import NEEDS, SHOWN, loaded, prepare, toy  # noqa: F401
from rows import LENGTH, STEPS, VOCABULARY, Row, Watch, world

ENVIRONMENT = "transformers"


def samples_of(row, count=8 * STEPS):
    """Texts of 4 to LENGTH tokens, padded by the collator; `alike` are all of LENGTH."""
    import torch

    draw, found = torch.Generator().manual_seed(0), []
    for i in range(count):
        length = LENGTH if row.options.get("alike") else 4 + (5 * i + 3) % (LENGTH - 3)
        ids = torch.randint(3, VOCABULARY, (length,), generator=draw)
        found.append({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    return found


def collate(samples):
    import torch

    rows = {}
    for key, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        rows[key] = torch.nn.utils.rnn.pad_sequence(
            [each[key] for each in samples], batch_first=True, padding_value=fill
        )
        rows[key] = torch.nn.functional.pad(rows[key], (0, LENGTH - rows[key].shape[1]), value=fill)
    return rows


def trainer(row, folder, trainer_class=None, arguments=None, model=None, **more):
    """8 samples a step in batches of 2: 4 in one process, 2 on each of two ranks."""
    import torch
    import transformers

    many = world() > 1
    size = row.options.get("size", 2)
    options = dict(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // (size * row.data if many else size),
        max_steps=STEPS,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        remove_unused_columns=False,
        logging_strategy="no",
        train_sampling_strategy="sequential",
    )
    options |= {**row.options.get("arguments", {}), **(dict(ddp_backend="gloo") if many else {})}
    args = (arguments or transformers.TrainingArguments)(str(folder / "trainer"), **options)
    sizes = row.options.get("sizes")
    model = model or (
        loaded(row, folder, distributed_config=transformers.distributed.DistributedConfig(**sizes))
        if sizes
        else toy(row, **row.options.get("config", {}))
    )
    seen = {}

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
            self.watch = Watch(running.model_wrapped, optimizer, folder)

        def on_pre_optimizer_step(self, *args, **kwargs):
            self.watch.step(norm=seen.pop("norm", None))

        def on_train_end(self, *args, **kwargs):
            self.watch.close()

    running = (trainer_class or transformers.Trainer)(
        model=model, args=args, callbacks=[Callback()],
        **({"train_dataset": samples_of(row), "data_collator": collate} | more))
    clip = running.accelerator.clip_grad_norm_

    def clip_and_keep(*args, **kwargs):
        norm = clip(*args, **kwargs)
        seen["norm"] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return norm
    running.accelerator.clip_grad_norm_ = clip_and_keep
    running.train()


def before(row):
    import of_transformers

    of_transformers.before(row)


SIZES = {"DDP 2": None, "FSDP2 2": dict(fsdp_size=2)}  # accelerate's own FSDP is DDP on a CPU: the model brings it
ARGUMENTS = {"": {}, ", clipped": dict(max_grad_norm=0.1), ", label smoothing": dict(label_smoothing_factor=0.1),
             ", group_by_length": dict(train_sampling_strategy="group_by_length"),
             ", weight decay and warm-up": dict(weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine"),
             ", gradient checkpointing": dict(gradient_checkpointing=True), ", Adafactor": dict(optim="adafactor"),
             ", tokens averaged a rank": dict(average_tokens_across_devices=False)}
ROWS = [Row("trainer", "llama", over + words, trainer, data=2, options=dict(arguments=arguments, sizes=sizes))
        for over, sizes in SIZES.items() for words, arguments in ARGUMENTS.items()]
ROWS += [Row("trainer", model, over, trainer, data=2, options=dict(sizes=sizes, alike=True))
         for model in ("qwen3", "gemma3_text", "mixtral") for over, sizes in SIZES.items()]
ROWS += [
    Row(
        "trainer",
        "mixtral",
        "DDP 2, router's loss",
        trainer,
        data=2,
        options=dict(config=dict(output_router_logits=True)),
    ),
    Row("trainer", "llama", "tp 2", trainer, options=dict(sizes=dict(tp_size=2))),
    Row("trainer", "qwen3", "tp 2", trainer, options=dict(sizes=dict(tp_size=2))),
    Row(
        "trainer", "llama", "FSDP2 2 x tp 2", trainer, data=2, ranks=4, options=dict(sizes=dict(fsdp_size=2, tp_size=2))
    ),
]
