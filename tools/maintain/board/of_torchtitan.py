"""torchtitan's own Trainer, of its debug models with two or four layers, along every axis."""

import pathlib
import sys

from rows import STEPS, Row, Watch, world

NEEDS = ("torch==2.14.1", "torchtitan==0.3.0", "datasets<4.8", "spmd_types==0.2.3", "numpy<2.5")
SHOWN = ("torchtitan", "spmd_types")
PATCH = "what asks for a GPU, see same_numbers/found/_torchtitan.py"
FOUND = pathlib.Path(__file__).resolve().parents[3] / "same_numbers" / "found"


def prepare():
    sys.path.append(str(FOUND))
    import _torchtitan

    _torchtitan.prepare()
    import torchtitan.models.deepseek_v3
    import torchtitan.models.gpt_oss
    import torchtitan.models.llama3
    import torchtitan.models.qwen3  # noqa: F401


def train(row, folder):
    import importlib

    import _torchtitan
    import torch
    from torchtitan.distributed import utils

    family, options = row.options["family"], row.options
    models = importlib.import_module(f"torchtitan.models.{family}")
    spec = models.model_registry(options["flavor"], **options.get("model", {}))
    spec.model.layers = spec.model.layers[: options.get("layers", 2)]
    more = (
        dict(loss=models.MTPLoss.Config(global_vocab_size=spec.model.vocab_size)) if "mtp" in row.model.lower() else {}
    )
    axes = options["axes"] if world() > 1 else dict(enable_sequence_parallel=False)
    data = row.data if world() > 1 else 1
    length = 16
    trainer = _torchtitan.make(
        spec,
        folder / "titan",
        batch=8 // data // row.micro_batches if not options.get("pp") else 8,
        samples=8,
        length=length,
        **more,
        **axes,
    )
    _torchtitan.weights_by_name(trainer)
    parts = trainer.model_parts
    watch, clip, losses = Watch(parts, trainer.optimizers, folder), utils.clip_grad_norm_, []
    run = trainer.forward_backward_step

    def forward_backward(**kwargs):
        losses.append(run(**kwargs).detach())
        return losses[-1]

    def clip_and_record(*args, **kwargs):
        norm = clip(*args, **kwargs)
        loss = float(sum(each.full_tensor() if hasattr(each, "full_tensor") else each for each in losses))
        losses.clear()
        dims = trainer.parallel_dims
        if dims.dp_cp_enabled and not (options.get("pp") and loss < 0):  # a rank's is a summand
            loss = utils.dist_sum(torch.tensor(loss), dims.get_optional_mesh("loss"))
        watch.step(loss=None if options.get("pp") and loss < 0 else loss,
                   norm=norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        return norm
    trainer.forward_backward_step, utils.clip_grad_norm_ = forward_backward, clip_and_record
    mesh = trainer.parallel_dims.get_mesh("batch") if trainer.parallel_dims.dp_enabled else None
    own = mesh.get_local_rank() if mesh is not None else 0
    for step in range(STEPS):
        inputs, labels = _torchtitan.batches(step, 8, length)
        rows = range(own, 8, mesh.size() if mesh is not None else 1)
        size = 1 if options.get("pp") and world() > 1 else len(rows) // row.micro_batches
        cut = [rows[i:i + size] for i in range(0, len(rows), size)]
        _torchtitan.step(
            trainer,
            step + 1,
            [({key: each[list(part)] for key, each in inputs.items()}, labels[list(part)]) for part in cut],
        )
    watch.close()


MODELS = {
    "Llama 3": ("llama3", {}),
    "Qwen 3": ("qwen3", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", dict(attn_backend="flex")),
    "DeepSeek-V3 MTP": ("deepseek_v3", dict(num_mtp_layers=1)),
    "DeepSeek-V3 MTP 2": ("deepseek_v3", dict(num_mtp_layers=2)),
    "Qwen 3 experts": ("qwen3", {}),
}
AXES = {  # words: ranks, by how many samples are divided, the Trainer's settings
    "tp 2": (2, 1, dict(tensor_parallel_degree=2, enable_sequence_parallel=False)),
    "tp 2, sequence parallel": (2, 1, dict(tensor_parallel_degree=2)),
    "FSDP2 2": (2, 2, dict(data_parallel_shard_degree=2)),
    "DDP 2": (2, 2, dict(data_parallel_replicate_degree=2, data_parallel_shard_degree=1)),
    "cp 2": (2, 1, dict(context_parallel_degree=2)),
    "pp 2": (
        2,
        1,
        dict(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule="1F1B"),
    ),
    "FSDP2 2 x tp 2": (4, 2, dict(data_parallel_shard_degree=2, tensor_parallel_degree=2)),
}
SPARSE_AXES = {
    "ep 2": (2, 2, dict(data_parallel_shard_degree=2, expert_parallel_degree=2)),
    "tp 2, partial_dtensor": (
        2,
        1,
        dict(tensor_parallel_degree=2, enable_sequence_parallel=False, spmd_backend="partial_dtensor"),
    ),
}
FLAVORS = {"Qwen 3 experts": "debugmodel_moe"}


def rows():
    for model, (family, more) in MODELS.items():
        sparse = model not in ("Llama 3", "Qwen 3")
        for words, (ranks, data, axes) in {**AXES, **(SPARSE_AXES if sparse else {})}.items():
            if "MTP" in model and words not in ("tp 2", "tp 2, sequence parallel", "FSDP2 2"):
                continue
            yield Row("torchtitan", model, words, train, 1, ranks, data, patch=PATCH, options=dict(
                family=family, flavor=FLAVORS.get(model, "debugmodel"), model=more, axes=axes, group=True,
                pp="pp" in words))
    for words in ("tp 2", "FSDP2 2"):
        ranks, data, axes = AXES[words]
        yield Row("torchtitan", "Llama 3", words, train, 2, ranks, data, patch=PATCH, options=dict(
            family="llama3", flavor="debugmodel", axes=axes, group=True))


ROWS = sorted(rows(), key=lambda row: ("MTP" not in row.model, row.model != "gpt_oss", "DeepSeek" not in row.model))
