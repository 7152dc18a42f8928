"""Step 19: rollouts, whose weights travel between layouts and whose rewards become advantages."""

from collections import Counter
from types import SimpleNamespace

import torch

from catalogue import exercise
from counting_ranks import small_llama


@exercise("19", "rollouts.plan_transfers", hints=(
    "bounds(size, n) says where the parts of n tp ranks begin and end. A one-dimensional parameter is whole on each.",
    "What travels from one rank to another is where their parts overlap: from the later start to the earlier end.",
    "Starts are counted in each rank's own part: first - part[0] at the source, first - start at the destination."),
    blank=("sources =", "held, needed =", "for i, destination"), wrong=[
    ("the first replica sends all", "replica % num_replicas, stage", "0, stage", "take turns"),
    ("the first stage sends all", "num_replicas, stage", "num_replicas, 0", "weight not at all"),
    ("norms are cut", "1 if len(shape) == 1 else size", "size", "layernorm.weight: 16 of 24"),
    ("rows of the whole", "destination, first - start", "destination, first", "the plan says"),
    ("always the first rows", "first - part[0], destination", "0, destination", "numbers are wrong"),
    ("one source for each", "zip(sources, held)", "[*zip(sources, held)][i % len(held) :][:1]", "numbers are wrong")])
def weights_between_layouts(attempt):
    """Plan which rows or columns of each parameter travel from which trainer to which generator.

    Both sides cut a matrix over their tp ranks, as torch.tensor_split does, but over unlike numbers of them:

        trainers     |    rank 0    |    rank 1    |      0 -> 2, 0 -> 3, 1 -> 3, 1 -> 4
        generators   | rank 2  | rank 3  | rank 4  |

    The parameter has this shape, is on this stage, and is cut along dim; one of one dimension, as a norm's, is whole on
    all tp ranks. For each `replica` of the generators and its global `ranks`, append for each piece that travels
    Transfer(name, dim, source, source_start, destination, destination_start, length, numel): `length` rows or columns
    of numel numbers, which begin at source_start in the source's own part, and at destination_start in the other's.

    Each generator rank gets all that it holds, and each number once. The trainers' dp ranks hold the same: let them
    take turns. grid.trainers[dp, pp, tp] is a global rank, and bounds(size, parts) may be called.
    """
    def program_of(*sizes: int):
        def program(modules, rank):
            grid = attempt.grid(modules, *sizes[:3], generators=sizes[3], generator_tp_size=sizes[4])
            stage = small_llama(modules, lambda model: modules.pipeline_parallel.PipelineParallel(
                modules.tensor_parallel.apply_tensor_parallel(model)), hidden=24, heads=6, kv_heads=6, layers=3)
            plan, sent = modules.rollouts.plan_transfers(stage.config), Counter()
            params = dict(stage.named_parameters())
            for param in params.values():
                if grid.is_generator or param.dim() == 1:
                    param.detach().copy_(torch.tensor(torch.nan) if grid.is_generator else torch.arange(len(param)))
            for each in plan:
                sent[f"rank {each.source}"] += each.numel
                shape = [*params[each.name].shape] if each.name in params else []
                for who, start in each[2:4], each[4:6]:
                    attempt.require(who != rank or shape and 0 <= start <= shape[each.dim] - each.length and (
                        each.numel * shape[each.dim] == params[each.name].numel() * each.length),
                        f"rank {rank} has {each.name} {shape or 'not at all'}, and the plan says\n  {each}")
            modules.rollouts.transfer_weights(stage, plan)
            return sent, params if grid.is_generator else {}

        return program

    for sizes in ((1, 1, 1, 1, 1), (1, 2, 2, 3, 3), (1, 1, 3, 2, 2), (2, 2, 1, 4, 2)):
        size = sizes[0] * sizes[1] * sizes[2] + sizes[3]
        what = "dp {} x pp {} x tp {} and {} generators with --generator_tp_size {}".format(*sizes)
        (ours, _), (got, _) = (attempt.run(size, program_of(*sizes), is_ours) for is_ours in (True, False))
        for rank in range(size):
            attempt.same(got[rank][1], ours[rank][1], what, rank)
        attempt.require(max(got[0][0].values()) <= max(ours[0][0].values()), f"{what}: so many numbers are sent by\n  "
                        f"{dict(got[0][0])}\n  Let the dp ranks take turns.")
    attempt.score("numbers that travel to 2 generators on 4 ranks", got[0][0].total(), sum(
        param.numel() for _, params in got for param in params.values()))


@exercise("19", "rollouts.Rollouts.loss", hints=(
    "Rows of rewards.view(-1, G) are groups, so means are along dimension 1, with keepdim=True.",
    "Advantages are rewards minus their group's mean: zero where all of a group are equal.",
    "Divide by std(dim=1, correction=0, keepdim=True) + 1e-4, unless self.args.advantages is \"dr_grpo\"."),
    blank=("groups =", "advantages = groups", "if self.args.advantages"), wrong=[
    ("the batch's mean", "groups.mean(dim=1, keepdim=True)", "groups.mean()", "rewards [1, 0, 0, 1]"),
    ("equal rewards", " + 1e-4", "", "[0.5, 0.5, 0.5, 0.5]: the advantages are NaN"),
    ("over G - 1", "correction=0, ", "", "numbers are wrong"),
    ("Dr. GRPO divides, too", 'if self.args.advantages == "grpo":', "if True:", "--advantages dr_grpo"),
    ("the batch's deviation", "groups.std(dim=1, ", "groups.std(dim=0, ", "rewards [1, 0, 0, 1]")])
def group_advantages(attempt):
    """Say how much better each answer is than the others to the same prompt.

    `rewards` (N G,) has those of the G = self.args.group_size answers to the first prompt, then to the second, and so
    on. Make `advantages` (N, G): a reward minus the mean of its group, divided by the standard deviation of its group
    (the mean square's root, not over G - 1) plus 1e-4. With self.args.advantages == "dr_grpo" nothing is divided.

        rewards       |  1  0  0  1  |  0.5  0.5  0.5  0.5  |     where all are equal, no answer is better than
        advantages    |  1 -1 -1  1  |   0    0    0    0   |     the others, and no token gets more probable
    """
    def program(modules, rank):
        attempt.grid(modules)
        modules.rollouts.log_probs, found = lambda out, ids, vocab_size: out, {}
        for kind in ("grpo", "dr_grpo"):
            for rewards in ([[1, 0, 0, 1], [0.5] * 4, [0, 0.25, 0.5, 0.75]], [[0.25, 0.5]], [[1, 1], [0.75, 0]]):
                groups = torch.tensor(rewards, dtype=torch.float64)
                log_p = torch.zeros(groups.numel(), modules.rollouts.PROMPT_TOKENS, dtype=torch.float64)  # 1 of answers
                numbers, args = torch.cat([log_p[:, :1], groups.view(-1, 1)], 1), SimpleNamespace(
                    group_size=groups.size(1), advantages=kind)
                modules.rollouts.Rollouts.loss(
                    SimpleNamespace(args=args, rewards=[], mismatch=log_p[0, 0]), log_p.requires_grad_(),
                    {"numbers": numbers, "target_ids": log_p}, 1).backward()
                for row, each in zip(rewards, -log_p.grad[:, -1].view(groups.shape) * groups.numel()):
                    what = f"--advantages {kind}, a group with the rewards {row}"
                    attempt.require(not each.isnan().any(), f"{what}: the advantages are NaN: 0 / 0?")
                    found[what] = each
        return found

    attempt.both(1, program, "advantages")
