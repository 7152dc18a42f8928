"""Wrong and right answers to the exercises of step 19."""

from blanks import find
from lab.launch import STEPS
from versions import Versions, Wrong

VERSIONS = {
    "weights_between_layouts": Versions(
        wrong=[
            Wrong("the first replica sends all", "replica % num_replicas, stage", "0, stage", "take turns"),
            Wrong("the first stage sends all", "num_replicas, stage", "num_replicas, 0", "weight not at all"),
            Wrong("norms are cut", "1 if len(shape) == 1 else size", "size", "layernorm.weight: 16 of 24"),
            Wrong("rows of the whole", "destination, first - start", "destination, first", "the plan says"),
            Wrong("always the first rows", "first - part[0], destination", "0, destination", "numbers are wrong"),
            Wrong("one source for each", "zip(sources, held)", "[*zip(sources, held)][i % len(held) :][:1]",
                  "numbers are wrong"),
        ],
        right=find(STEPS["19"] / "rollouts.py", "plan_transfers").source().replace("return plan", "return plan[::-1]")),
    "group_advantages": Versions(
        wrong=[
            Wrong("the batch's mean", "groups.mean(dim=1, keepdim=True)", "groups.mean()", "rewards [1, 0, 0, 1]"),
            Wrong("equal rewards", " + 1e-4", "", "[0.5, 0.5, 0.5, 0.5]: the advantages are NaN"),
            Wrong("over G - 1", "correction=0, ", "", "numbers are wrong"),
            Wrong("Dr. GRPO divides, too", 'if self.args.advantages == "grpo":', "if True:", "--advantages dr_grpo"),
            Wrong("the batch's deviation", "groups.std(dim=1, ", "groups.std(dim=0, ", "rewards [1, 0, 0, 1]"),
        ],
        right='''
def loss(self, out, batch, vocab_size):
    *log_q, rewards = batch["numbers"].unbind(1)
    centred = [group - group.sum() / len(group) for group in rewards.split(self.args.group_size)]
    if self.args.advantages != "dr_grpo":
        centred = [each / ((each @ each / len(each)).sqrt() + 1e-4) for each in centred]
    log_p = log_probs(out[:, PROMPT_TOKENS - 1 :], batch["target_ids"][:, PROMPT_TOKENS - 1 :], vocab_size)
    ratio, advantages = (log_p - torch.stack(log_q, 1)).exp(), torch.cat(centred).view(-1, 1)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
'''),
}
