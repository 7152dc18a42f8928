"""Faults of rollouts: between ranks that generate answers and ranks that learn from them."""

from museum.fault import Fault

FILE, SIZES = "rollouts.py", "--micro_batch_size 2 --group_size 4 --seq_len 8"
TAKE, TURN = "PROMPT_TOKENS - 1 :]", "range(args.group_size) for n in prompts]"
UNLIKE_LENGTHS = (  # an answer ends with its first token of every fourth id
    (FILE, "\n\ndef run_generator(", "\n\ndef counted(answers):\n    is_end = answers % 4 == 0\n"
     "    return is_end.cumsum(1) - is_end.long() == 0\n\n\ndef run_generator("),
    (FILE, "                                    for i in range(self.gradient_accumulation_steps))\n",
     "                                    for i in range(self.gradient_accumulation_steps))\n"
     "        count = sum(counted(ids[:, PROMPT_TOKENS:]).sum() for ids, _ in self.batches)\n"
     "        dist.all_reduce(count, group=self.grid.dp_group)\n"
     "        self.count = count / self.grid.dp_world_size / self.gradient_accumulation_steps\n"),
    (FILE, " * advantages).mean().to(out.dtype)", " * advantages).mul(counted(\n            "
     f'batch["target_ids"][:, {TAKE})).sum().div(self.count).to(out.dtype)'))

FAULTS = (
    Fault("asleep", f"19 --generators 1 {SIZES}",
          "A generator that wakes up loads its first weights again, over those that it was sent.",
          ("huggingface/trl#5312", "huggingface/trl#5355"),
          ((FILE, "    num_replicas, num_stages, _ = grid.trainers.shape\n", "    num_replicas, num_stages, _ = grid."
            "trainers.shape\n    first = {name: each.clone() for name, each in stage.state_dict().items()}\n"),
           (FILE, "        answers = {i: gen", "        stage.load_state_dict(first)\n        answers = {i: gen")),
          {"numbers": "step 2: samples: .* others are"}),
    Fault("unaligned", f"19 --generators 1 {SIZES}",
          "The trainers' log-probabilities begin a token early: p and q are those of unlike tokens.",
          ("PrimeIntellect-ai/prime-rl#1525", "modelscope/ms-swift#8196"),
          ((FILE, f'out[:, {TAKE}, batch["target_ids"][:, {TAKE}',
            'out[:, PROMPT_TOKENS - 2 : -1], batch["target_ids"][:, PROMPT_TOKENS - 2 : -1]'),),
          {"numbers": ("all 39", "loss is wrong already.*masks and targets")}),
    Fault("turns", f"19 --generators 1 {SIZES}",
          "Prompts are repeated in turns: what is compared as a group are answers to unlike prompts.",
          ("PrimeIntellect-ai/prime-rl#600", "StarsfieldAI/R1-V#67"),
          ((FILE, "n in prompts for _ in range(args.group_size)]", f"_ in {TURN}"),
           (FILE, "n in prompts for answer in range(args.group_size)]", f"answer in {TURN}")),
          {"numbers": "all 39 parameters: wrong"}),
    Fault("tokens", f"19 --generators 0 --dp_size 2 {SIZES}",
          "Each rank divides by the tokens of its own answers: where these are short, a token counts more.",
          ("NovaSky-AI/SkyRL#925", "PrimeIntellect-ai/prime-rl#2562"),
          ((FILE, "        dist.all_reduce(count, group=self.grid.dp_group)\n", ""),
           (FILE, "count / self.grid.dp_world_size / self", "count / self")),
          {"numbers": "all 39 parameters: wrong", "bytes": "8,004,672 bytes, and 8,004,688"}, UNLIKE_LENGTHS),
)
