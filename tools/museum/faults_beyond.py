"""The faults of steps 10 to 16 that break_it.py switches on, behind those of the steps before (faults.py)."""

from lab.program import Edit
from museum import faults as break_faults
from museum.faults import DP2, PP2, TP2, Fault

CP2 = ("--cp_size", "2", "--gradient_accumulation_steps", "8", "--max_tokens", "40960")
EXPERTS = ("--num_experts", "4")

FAULTS = break_faults.FAULTS | {
    "postponed": Fault(
        "10", "The weights' gradients that are still postponed when backward ends are never computed.",
        (Edit("pipeline_parallel.py", "    yield from waiting\n", ""),),
        (*PP2, "--pp_engine", "zb"), "simulation", ("deepspeedai/Megatron-DeepSpeed#442",)),
    "shards": Fault(
        "12", "Each replica takes the norm of its own shards for that of all gradients, and clips by it.",
        (Edit("zero.py", "        dist.all_reduce(squares)\n", ""),),
        (*DP2, "--zero", "1"), "same", ("pytorch/xla#4796",)),
    "norms": Fault(
        "14", "The gradients of the norms, which see a tp rank's own tokens, are not summed: the norms drift apart.",
        (Edit("train.py", "        sum_norm_gradients(model)\n", "        pass\n"),),
        (*TP2, "--sequence_parallel"), "same", ("NVIDIA/Megatron-LM#1446", "EleutherAI/gpt-neox#1257")),
    "targets": Fault(
        "15", "Targets are shifted after the text is divided: the last token of each part gets a wrong one.",
        (Edit("dataloader.py", '"target_ids": tokens[:, position_ids + 1]',
              '"target_ids": tokens[:, position_ids].roll(-1, dims=1)'),),
        CP2, "same", ("huggingface/transformers#36607", "NVIDIA-BioNeMo/bionemo-recipes#1449")),
    "positions": Fault(
        "15", "Each rank counts the positions of its own tokens from 0, so rotary angles are those of other tokens.",
        (Edit("model.py", "torch.outer(position_ids.float(), frequencies)",
              "torch.outer(torch.arange(len(position_ids), device=device).float(), frequencies)"),),
        CP2, "same", ("NVIDIA/Megatron-LM#5243",)),
    "stale": Fault(
        "15", "Backward of the ring takes its own keys and values at each hop, not those that have come around.",
        (Edit("context_parallel.py", "q[:, :, queries], k[:, :, keys], v[:, :, keys],\n",
              "q[:, :, queries], *own[:, :, :, keys],\n"),),
        CP2, "same", ("huggingface/diffusers#14265",)),
    "mean": Fault(
        "15", "Gradients are summed over dp x cp ranks and divided by the dp ranks: cp times too large.",
        (Edit("data_parallel.py", "        self.grad_data /= self.process_group.size()\n",
              "        self.grad_data /= pgm.process_group_manager.dp_world_size\n"),),
        (*CP2, "--max_grad_norm", "0"), "same", ("NovaSky-AI/SkyRL#1420", "NVIDIA/Megatron-LM#906")),
    "experts": Fault(
        "16", "Experts' gradients are divided by the ranks that hold the same experts: ep times too large.",
        (Edit("expert_parallel.py", "            bucket.process_group = pgm.process_group_manager.experts.all\n",
              "            bucket.process_group = pgm.process_group_manager.experts.all\n"
              "            bucket.divisor = bucket.process_group.size()\n"),),
        (*DP2, *EXPERTS, "--ep_size", "2", "--max_grad_norm", "0"), "same",
        ("pytorch/pytorch#160285", "NVIDIA/Megatron-LM#5956", "deepspeedai/DeepSpeed#6546")),
    "router": Fault(
        "16", "Each tp rank draws from a seed of its own, also the router, which all of them hold whole.",
        (Edit("train.py", "init_weights(model, args.seed, device",
              "init_weights(model, args.seed + grid.tp_rank, device"),),
        (*TP2, *EXPERTS), "same", ("NVIDIA-NeMo/Automodel#1291",)),
}
