"""Step 17: replicas that take steps by themselves, and agree on weights again."""

from catalogue import exercise


@exercise("17", "local_steps.LocalSteps.exchange", hints=(
    "For each parameter and its entry of self.start: param.grad = start - param, and the weights go back to the start, "
    "in place. Where self.buckets is not empty, self.bucket_of[param].take(param) moves the gradient into its bucket.",
    "super().finish_gradient_sync() divides all buckets by the number of replicas and sums them over the dp group. "
    "self.keep_copies_equal() comes behind it, and then the step of self.outer_optimizer.",
    "The weights after the outer step are the start of the next round: copy them into self.start, in place."), wrong=[
    ("the sign is turned", "start - param", "param - start", "the loss of step 3"),
    ("replicas continue from their own weights", "        param.copy_(start)\n", "", "the loss of step 3"),
    ("the start stays that of the first round", "        start.copy_(param)\n", "        pass\n", "the loss of step 5"),
    ("a single replica has no buckets", "if self.buckets:", "if True:", "KeyError")])
def exchange(attempt):
    """End a round: all replicas agree on weights again, and the next round starts there.

    In the round each replica has moved from the same weights, self.start, to its own:

        replica 0   start - a                                        outer gradient: the mean of a and b
        replica 1   start - b    ->  an all-reduce of a and b   ->   outer optimizer: one step from start along it

    self.start holds a tensor for each of self.module.parameters(), in their order. self.outer_optimizer has these very
    parameters: it reads param.grad and updates param.

    You may call: self.bucket_of[param].take(param), which moves param.grad into the bucket of this parameter;
    super().finish_gradient_sync(), which averages all buckets over the replicas; self.keep_copies_equal(), which mends
    the gradient of a tied embedding after that. A single replica has no buckets: self.buckets is empty.
    """
    common = " --local_steps 2 --num_hidden_layers 1 --outer_learning_rate 0.7 --outer_momentum 0.9"
    common += " --gradient_accumulation_steps 1 --max_tokens "
    for size, flags in ((2, "--dp_size 2" + common + "160"), (1, "--dp_size 1" + common + "48")):
        got, ours = attempt.train(size, flags), attempt.train(size, flags, ours=True)
        what = f"train.py {flags.partition(' --num')[0]}"
        for step, row in enumerate(ours.rows):
            attempt.same(got.rows[step]["loss"], row["loss"], f"{what}: the loss of step {step + 1}")
        for rank in range(size):
            attempt.same(got.weights[rank][-1], ours.weights[rank][-1], f"{what}: the weights in the end", rank)
