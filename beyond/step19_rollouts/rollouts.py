"""Rollouts: a model answers prompts, a program rewards the answers, and training makes rewarded answers more probable.

Generators and trainers hold the same model in unlike layouts. Trainers have the dp x pp x tp grid of step 8, with
masters, gradients and AdamW's averages. A generator has weights alone, in the dtype of the activations: the whole model
on one rank, or a part on each of --generator_tp_size ranks. An optimizer step k, for two generators:

    generators     answer the prompts of step k, each those of every second micro-batch
      -> trainers  a micro-batch's tokens to the first stage; tokens, log-probabilities and rewards to the last stage
    trainers       forward and backward as in step 8 with the loss of GRPO, AdamW
      -> generators  the new weights, each tensor from the shards that hold it to the ranks that need it

With --lag 0 each side waits while the other works. With --lag 1 the generators answer the prompts of step k + 1, with
the weights of after step k - 1, while step k trains: both work at once, on answers that are one step older.
With --generators 0 the trainers do both: they answer as a pipeline that only goes forward, one token at a time.

Group relative policy optimization (GRPO; DeepSeekMath, Shao et al. 2024, arXiv 2402.03300): each prompt gets a group of
answers, and an answer's advantage is its reward minus the group's mean, divided by the group's standard deviation. No
second model estimates values. The loss is that of PPO, with A for the advantage, p for the probability of a token under
the weights that train, and q under those that generated it:

    - mean over tokens of min(p/q A, clip(p/q, 1 - c, 1 + c) A)

At --lag 0 p/q is 1 but for rounding, and at --lag 1 it corrects for older weights. Dr. GRPO (Liu et al. 2025, arXiv
2503.20783) leaves out the division by the deviation (--advantages dr_grpo), as it weighs prompts by how alike their
rewards are, and the division by an answer's length, which makes no difference here: all answers are equally long. The
distance to a reference model, a further term of GRPO, is left out, as the model starts from random weights.

Sampling adds noise to the logits and takes the largest sum (Gumbel-max). The noise is seeded by step, prompt, answer
and position, and so the tokens do not depend on which rank generates them.
Shapes: N prompts of a micro-batch, G answers each, P tokens of a prompt, A of an answer, T = P + A - 1, V vocabulary.
"""

from collections import Counter, deque
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import all_reduce_loss_across_dp_ranks
from dataloader import PROMPT_TOKENS, LetterTask, reward, seeded
from model import Llama, cast_weights_once
from tensor_parallel import all_reduce, log_probs, split_over_tp
from utils import UserError, to_readable_format

CLIP = 0.2  # c
DEFAULTS = {"group_size": 8, "generator_tp_size": 1, "lag": 0, "advantages": "grpo"}


def check_rollout_flags(args):
    """Fills in defaults. Raises UserError for flags that do not go together. `generators` is None without rollouts."""
    is_on = args.generators is not None
    args.seq_len = args.seq_len or (8 if is_on else 128)
    for name, default in DEFAULTS.items():
        if not is_on and getattr(args, name) is not None:
            raise UserError(f"--{name} {getattr(args, name)} without --generators: add --generators 1 (or 0, where "
                            f"trainers generate), or leave --{name} out")
        if is_on and getattr(args, name) is None:
            setattr(args, name, default)
    if not is_on:
        return args
    for name, default in {"dataset_name": "sotu", "num_workers": 0, "eval_every": 0, "profile_batch": 0}.items():
        if (value := getattr(args, name)) != default:
            why = "a timeline is one of trainers alone" if name == "profile_batch" else "rollouts read no corpus"
            raise UserError(f"--{name} {value} with --generators {args.generators}: {why}, leave --{name} out")
    if args.group_size < 2:
        raise UserError(f"--group_size {args.group_size}: answers of a group are compared, use 2 or more")
    if args.generators % args.generator_tp_size or not args.generators and args.generator_tp_size > 1:
        raise UserError(f"--generators {args.generators} is no multiple of --generator_tp_size "
                        f"{args.generator_tp_size}: change one of them")
    if args.seq_len < PROMPT_TOKENS:
        raise UserError(f"--seq_len {args.seq_len} ends within the {PROMPT_TOKENS} tokens of a prompt: use more")
    return args


def gumbel_noise(*words: int, size: int) -> torch.Tensor:
    """(size,) float64. The largest of logits plus this noise is a token drawn with the probabilities of softmax."""
    return -torch.rand(size, dtype=torch.float64, generator=seeded("noise", *words)).log().neg().log()


class Answers(NamedTuple):
    ids: torch.Tensor | None  # (N G, T + 1): prompt and answer
    numbers: torch.Tensor | None  # (N G, A + 1) float64: log q of the answer's tokens, and its reward; on last stages


@torch.no_grad()
def generate(args, stage: nn.Module, task: LetterTask, step: int, microbatch: int) -> Answers:
    """Answers the prompts of a micro-batch, of those of all dp ranks. Each token recomputes all tokens before it."""
    grid, vocab_size, device = pgm.process_group_manager, stage.config.vocab_size, next(stage.parameters()).device
    prompts = range(microbatch * args.micro_batch_size, (microbatch + 1) * args.micro_batch_size)
    ids = torch.tensor([task.prompt(step, n) for n in prompts for _ in range(args.group_size)], device=device)
    of_tokens = []  # log q, (N G,) each
    for position in range(args.seq_len + 1 - PROMPT_TOKENS):
        logits = forward_stages(stage, ids)
        if grid.pp_is_last_stage:
            noise = torch.stack([gumbel_noise(args.seed, step, n, answer, position, size=vocab_size)
                                 for n in prompts for answer in range(args.group_size)])
            drawn = largest(logits[:, -1].double() + split_over_tp(noise, 1).to(device), vocab_size)  # (N G,)
            of_tokens.append(log_probs(logits[:, -1:], drawn.unsqueeze(1), vocab_size).double())
        else:
            drawn = torch.zeros_like(ids[:, 0])
        if grid.pp_world_size > 1:  # the first stage needs it
            dist.broadcast(drawn, grid.ranks[grid.dp_rank, -1, grid.tp_rank].item(), group=grid.pp_group)
        ids = torch.cat([ids, drawn.unsqueeze(1)], dim=1)
    if not grid.pp_is_last_stage:
        return Answers(ids, None)
    texts = [task.text(row) for row in ids.tolist()]
    rewards = [[reward(text[:PROMPT_TOKENS], text[PROMPT_TOKENS:])] for text in texts]
    return Answers(ids, torch.cat([*of_tokens, torch.tensor(rewards, dtype=torch.float64, device=device)], dim=1))


def forward_stages(stage: nn.Module, ids: torch.Tensor) -> torch.Tensor | None:
    """The logits (B, t, V/tp) of token ids (B, t), on the last stage. All stages call it."""
    grid, shape = pgm.process_group_manager, (*ids.shape, stage.config.hidden_size)
    out = stage(ids if grid.pp_is_first_stage else
                receive(shape, stage.dtype, grid.pp_prev_rank, ids.device, grid.pp_group))
    return out if grid.pp_is_last_stage else send(out, grid.pp_next_rank, grid.pp_group)


def largest(scores: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The ids of the largest scores: (B, V/tp) -> (B,), the same on all tp ranks."""
    best, place = scores.max(dim=-1)
    all_reduce(highest := best.clone(), dist.ReduceOp.MAX)
    own_ids = split_over_tp(torch.arange(vocab_size, device=scores.device), 0)
    all_reduce(ids := own_ids[place].masked_fill(best < highest, -1), dist.ReduceOp.MAX)
    return ids


def send(tensor: torch.Tensor, rank: int, group=None) -> None:
    """gloo sends host memory alone, so a GPU's tensor is copied there."""
    dist.send((tensor.cpu() if dist.get_backend() == "gloo" else tensor).contiguous(), rank, group=group)


def receive(shape, dtype: torch.dtype, rank: int, device: torch.device, group=None) -> torch.Tensor:
    buffer = torch.zeros(shape, dtype=dtype, device="cpu" if dist.get_backend() == "gloo" else device)
    dist.recv(buffer, rank, group=group)
    return buffer.to(device)


class Transfer(NamedTuple):
    """`length` rows (dim 0) or columns (dim 1) of a parameter, `numel` numbers, from one rank's part to another's."""

    name: str
    dim: int
    source: int
    source_start: int
    destination: int
    destination_start: int
    length: int
    numel: int


def plan_transfers(config) -> list[Transfer]:
    """What travels after a step. Each generator rank is sent what it holds, once; the dp ranks share the sending."""
    grid, plan = pgm.process_group_manager, []
    num_replicas, num_stages, tp_size = grid.trainers.shape
    with torch.device("meta"):
        shapes = {name: param.shape for name, param in Llama(config).named_parameters()}
    stage_of = {i: s for s, part in enumerate(bounds(config.num_hidden_layers, num_stages)) for i in range(*part)}
    stage_of |= {"embedding": 0, "final_norm": num_stages - 1, "final_proj": num_stages - 1}
    for name, shape in shapes.items():
        words = name.split(".")
        stage = stage_of[int(words[1]) if words[0] == "decoder_layers" else words[0]]
        dim = int(words[-2] in ("out_proj", "down_proj"))  # row-parallel; norms are not split
        for replica, ranks in enumerate(grid.generators.flatten(1).tolist()):
            sources = grid.trainers[replica % num_replicas, stage].tolist()
            held, needed = (bounds(shape[dim], 1 if len(shape) == 1 else size) for size in (tp_size, len(ranks)))
            for i, destination in enumerate(ranks):
                start, stop = needed[i % len(needed)]
                for source, part in zip(sources, held):
                    if (length := min(stop, part[1]) - (first := max(start, part[0]))) > 0:
                        plan.append(Transfer(name, dim, source, first - part[0], destination, first - start, length,
                                             shape.numel() // shape[dim] * length))
    return plan


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Where the parts of torch.tensor_split begin and end."""
    rows, left_over = divmod(size, parts)
    ends = [i * rows + min(i, left_over) for i in range(parts + 1)]
    return list(zip(ends, ends[1:]))


@torch.no_grad()
def transfer_weights(stage: nn.Module, plan: list[Transfer]) -> None:
    """All ranks call it. They go through the plan in its order, so that none waits for ever, one tensor at a time."""
    rank, params = dist.get_rank(), dict(stage.named_parameters())
    for each in plan:
        if rank == each.source:
            part = params[each.name].narrow(each.dim, each.source_start, each.length)
            send(part.to(stage.dtype), each.destination)
        elif rank == each.destination:
            part = params[each.name].narrow(each.dim, each.destination_start, each.length)
            part.copy_(receive(part.shape, stage.dtype, each.source, part.device))


def describe(plan: list[Transfer], dtype: torch.dtype) -> str:
    links = Counter()
    for each in plan:
        links[each.source, each.destination] += each.numel * dtype.itemsize
    parts = [f"{source} -> {target} {to_readable_format(size)}B" for (source, target), size in links.items()]
    return (f"weights for generators: {to_readable_format(sum(links.values()))}B a step in {len(plan)} messages over "
            f"{len(links)} links: {', '.join(parts[:8])}{', ...' * (len(parts) > 8)}")


class Rollouts:
    """A trainer's micro-batches, of generators or its own: begin(step), then next() for each of them, end(step)."""

    def __init__(self, args, stage: nn.Module, num_steps: int, device: torch.device):
        self.args, self.stage, self.num_steps, self.grid = args, stage, num_steps, pgm.process_group_manager
        self.gradient_accumulation_steps, self.device = args.gradient_accumulation_steps, device
        self.plan = plan_transfers(stage.config) if args.generators else []
        self.task = None if args.generators else LetterTask(args.model_name, args.seed, stage.config.vocab_size)
        self.batches: deque[Answers] = deque()
        self.num_generated = 0  # steps
        if self.plan and self.grid.is_logging_rank:
            print(describe(self.plan, stage.dtype), flush=True)

    def begin(self, step: int) -> None:
        """Receives the answers of a step, or generates them, with --lag 1 those of the step after it."""
        self.rewards, self.mismatch = [], torch.zeros((), dtype=torch.float64, device=self.device)
        if self.args.generators:
            self.batches.extend(map(self.receive, range(self.gradient_accumulation_steps)))
        while not self.args.generators and self.num_generated < min(step + self.args.lag, self.num_steps):
            self.num_generated += 1
            with cast_weights_once():
                self.batches.extend(generate(self.args, self.stage, self.task, self.num_generated, self.number(i))
                                    for i in range(self.gradient_accumulation_steps))

    def number(self, i: int) -> int:
        """Of this dp rank's micro-batch i among those of all dp ranks, which take turns, as in step 8."""
        return i * self.grid.dp_world_size + self.grid.dp_rank

    def receive(self, i: int) -> Answers:
        if not (self.grid.pp_is_first_stage or self.grid.pp_is_last_stage):
            return Answers(None, None)
        source = self.grid.generators[self.number(i) % len(self.grid.generators), 0, 0].item()
        num_answers, seq_len = self.args.micro_batch_size * self.args.group_size, self.args.seq_len
        ids = receive((num_answers, seq_len + 1), torch.int64, source, self.device)
        shape = num_answers, seq_len + 2 - PROMPT_TOKENS
        numbers = receive(shape, torch.float64, source, self.device) if self.grid.pp_is_last_stage else None
        return Answers(ids, numbers)

    def __next__(self) -> dict[str, torch.Tensor]:
        ids, numbers = self.batches.popleft()
        return {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:], "numbers": numbers}

    def loss(self, out: torch.Tensor, batch: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
        """GRPO's, of logits (N G, T, V/tp)."""
        log_q, rewards = batch["numbers"][:, :-1], batch["numbers"][:, -1]
        groups = rewards.view(-1, self.args.group_size)  # (N, G)
        advantages = groups - groups.mean(dim=1, keepdim=True)
        if self.args.advantages == "grpo":
            advantages = advantages / (groups.std(dim=1, correction=0, keepdim=True) + 1e-4)
        log_p = log_probs(out[:, PROMPT_TOKENS - 1 :], batch["target_ids"][:, PROMPT_TOKENS - 1 :], vocab_size)
        log_ratio = log_p - log_q  # (N G, A) float64
        ratio, advantages = log_ratio.exp(), advantages.view(-1, 1)
        self.rewards.append(rewards.mean())
        self.mismatch = torch.maximum(self.mismatch, log_ratio.detach().abs().max())
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean().to(out.dtype)

    def end(self, step: int) -> dict[str, float]:
        """Sends new weights. Returns the mean reward, and the largest |log p/q| of a token. All trainers call it."""
        if step + self.args.lag < self.num_steps:
            transfer_weights(self.stage, self.plan)
        dist.all_reduce(self.mismatch, dist.ReduceOp.MAX, self.grid.dp_group)
        mean = all_reduce_loss_across_dp_ranks(sum(self.rewards, torch.zeros_like(self.mismatch)))
        return {"reward": mean.item() / self.gradient_accumulation_steps, "log_ratio": self.mismatch.item()}


def run_generator(args, stage: nn.Module, num_steps: int) -> None:
    """A generator's whole run: all steps' answers, sent to trainers, and new weights in between."""
    grid, plan = pgm.process_group_manager, plan_transfers(stage.config)
    task = LetterTask(args.model_name, args.seed, stage.config.vocab_size)
    num_replicas, num_stages, _ = grid.trainers.shape
    for step in range(1, num_steps + 1):
        answers = {i: generate(args, stage, task, step, i) for i in range(
            grid.dp_rank, args.gradient_accumulation_steps * num_replicas, grid.dp_world_size)}
        if args.lag and 1 < step < num_steps:  # the weights of after the step before, for the next answers
            transfer_weights(stage, plan)
        for i, (ids, numbers) in answers.items() if grid.tp_rank == 0 else ():
            for pp in {0, num_stages - 1}:
                for trainer in grid.trainers[i % num_replicas, pp].tolist():
                    send(ids, trainer)
                    if pp == num_stages - 1:
                        send(numbers, trainer)
        if not args.lag and step < num_steps:
            transfer_weights(stage, plan)
    dist.destroy_process_group()
