"""What a rank holds of a model and its optimizer, by the names that Hugging Face's files have."""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.files import KINDS

THEIR_NAMES = (  # our Llama's -> Hugging Face's
    (r"^embedding\.", "model.embed_tokens."),
    (r"^decoder_layers\.", "model.layers."),
    (r"^final_norm\.", "model.norm."),
    (r"^final_proj\.", "lm_head."),
    (r"\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.", ".self_attn."),
)


def their_name(name: str) -> str:
    """A parameter of our Llama as Hugging Face calls it."""
    for pattern, replacement in THEIR_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


class Part(NamedTuple):
    """With --optimizer_shares, of a parameter of this `shape`. `own`: the numbers that this rank updates, from number
    `start` on, maybe none: a view of them. `counts`: for each owner, by rank, how many it updates."""

    own: torch.nn.Parameter
    start: int
    counts: dict[int, int]
    shape: torch.Size

    @property
    def writer(self) -> int:
        """The rank that writes it into a checkpoint: the first owner, on pipeline 0."""
        return min(self.counts)


class Piece(NamedTuple):
    """A tensor that this rank holds, or its part of one: along `dim`, in each of `fused` matrices side by side. `part`:
    of which `tensor` is this Part."""

    name: str
    tensor: torch.Tensor
    dim: int | None
    fused: int
    part: Part | None = None


def peft_name(name: str) -> str:
    """A parameter of a model of transformers in the files: an adapter's has the name that peft gives it there."""
    return f"base_model.model.{name.replace('.default.', '.')}" if ".lora_" in name else name


def name_function(stage) -> Callable[[str], str]:
    """From a parameter's name in the model to that in the files."""
    return peft_name if hasattr(stage.model, "base_model_prefix") else their_name


def trained_alone(stage) -> set[str] | None:
    """The names of the adapters' parameters, where these are all that is trained and saved; else None."""
    return {name for name, _ in stage.model.named_parameters() if ".lora_" in name} or None


def pieces_of(stage, optimizer: torch.optim.Optimizer) -> dict[str, list[Piece]]:
    """What this rank writes, by kind of file: on pipeline 0 what it holds, but for a tied head where the embedding
    stands for it. And its parts of averages, which join_parts() sends to the rank that writes these."""
    found, tied, name_of = {kind: [] for kind in KINDS}, stage.tied, name_function(stage)
    trained, parts = trained_alone(stage), getattr(optimizer, "parts", {})  # the latter with --optimizer_shares
    is_writer = pgm.process_group_manager.dp_rank == 0
    for name, param in stage.model.named_parameters():
        writes, part = is_writer and not (tied and name == tied[1] and not stage.is_first), parts.get(param)
        if trained and name not in trained or not writes and not part:
            continue
        module, _, key = name.rpartition(".")
        module, name = stage.model.get_submodule(module), name_of(tied[0] if tied and name in tied else name)
        split = getattr(module, "tp_dims", {}).get(key), getattr(module, "tp_fused", {}).get(key, 1)
        if writes:
            found["model"].append(Piece(name, param.detach(), *split))
        own = part.own if part else param
        for entry, value in optimizer.state.get(own, {}).items():
            if isinstance(value, torch.Tensor):
                is_average = value.shape == own.shape
                if writes or is_average:
                    found["optimizer"].append(Piece(f"{name}.{entry}", value, *(split if is_average else (None, 1)),
                                                    part if is_average else None))
    own = tuple(f"{name}." for name in stage.template.modules_per_stage[stage.stage_index])
    params = dict(stage.model.named_parameters(remove_duplicate=False))
    found["model"] += [Piece(name_of(name), buffer, None, 1) for name, buffer in stage.model.state_dict().items()
                       if name not in params and name.startswith(own) and not trained and is_writer]
    return {kind: sorted(pieces, key=lambda piece: (-piece.tensor.dtype.itemsize, piece.name))
            for kind, pieces in found.items()}


def shapes_over(group: dist.ProcessGroup | None, pieces: list[Piece]) -> list[list[torch.Size]]:
    """For each piece, the shapes of the parts that the ranks of the tensor-parallel `group` hold. Collective in it."""
    everyone = [[(piece.part or piece.tensor).shape for piece in pieces]]
    if group:
        everyone *= group.size()
        dist.all_gather_object(everyone, everyone[0], group=group)
    return [shapes[:1] if piece.dim is None else shapes for piece, *shapes in zip(pieces, *everyone)]


def whole_shape(piece: Piece, shapes: list[torch.Size]) -> list[int]:
    whole = list(shapes[0])
    if piece.dim is not None:
        whole[piece.dim] = sum(shape[piece.dim] for shape in shapes)
    return whole


def join_parts(piece: Piece, group: dist.ProcessGroup) -> Piece | None:
    """The piece as a whole, on the rank that writes it, to which those that have a part of it send theirs: None there.
    All ranks call it for their pieces in the order of pieces_of(), which is the same on all. `group`: of all ranks."""
    if not piece.part:
        return piece
    own, counts = piece.tensor.cpu(), piece.part.counts
    if dist.get_rank() != piece.part.writer:
        if len(own):
            dist.send(own.view(torch.uint8), piece.part.writer, group)
        return None
    whole = torch.empty(piece.part.shape, dtype=own.dtype)
    for (rank, count), part in zip(counts.items(), whole.flatten().split([*counts.values()])):
        if rank == piece.part.writer:
            part.copy_(own)
        elif count:
            dist.recv(part.view(torch.uint8), rank, group)
    return piece._replace(tensor=whole, part=None)


def join(piece: Piece, shapes: list[torch.Size], group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """The whole tensor, on the first rank of `group`, to which the others send their parts of it."""
    own = piece.tensor.cpu().contiguous()
    if len(shapes) == 1:
        return own
    if group.rank() > 0:
        dist.send(own.flatten().view(torch.uint8), group=group, group_dst=0)
        return None
    parts = [own, *(torch.empty(shape, dtype=own.dtype) for shape in shapes[1:])]
    for source, part in enumerate(parts[1:], 1):
        dist.recv(part.flatten().view(torch.uint8), group=group, group_src=source)
    chunks = [part.chunk(piece.fused, piece.dim) for part in parts]  # of each rank, one of each fused matrix
    return torch.cat([chunk[k] for k in range(piece.fused) for chunk in chunks], piece.dim)


def as_files_have_it(model, name: str, kind: str) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    """A function that turns a parameter into what files have for it: of a mixture of experts each expert by itself."""
    if kind != "model" or not hasattr(model, "base_model_prefix") or ".lora_" in name:
        return lambda full: {name: full}
    from transformers.core_model_loading import revert_weight_conversion

    return lambda full: revert_weight_conversion(model, {name: full})
