"""Wrong and right answers to the exercises of step 6; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "buckets": Versions(
        wrong=[
            Wrong("what is left gets no bucket", "size >= limit or param is params[-1]", "size >= limit",
                  "the parameters of each bucket, with limit = 80"),
            Wrong("the size counts on", "            members, size = [], 0\n", "            members = []\n",
                  "the parameters of each bucket, with limit = 60"),
            Wrong("numbers are counted instead of bytes", "param.numel() * param.element_size()", "param.numel()",
                  "with limit = 60"),
            Wrong("a bucket stays below the limit", "        members.append(param)\n",
                  "        if members and size + param.nbytes > limit:\n"
                  "            self.buckets.append(Bucket(members, pgm.process_group_manager.dp_group))\n"
                  "            self.bucket_of.update(dict.fromkeys(members, self.buckets[-1]))\n"
                  "            members, size = [], 0\n        members.append(param)\n",
                  "the parameters of each bucket, with limit = 60"),
            Wrong("bucket_of is forgotten", "self.bucket_of.update(dict.fromkeys(members, self.buckets[-1]))", "pass",
                  "bucket_of leads to"),
        ],
        right='''
def initialize_buckets(self, params, limit):
    lists, full = [], True
    for param in params:
        if full:
            lists.append([])
        lists[-1].append(param)
        full = sum(each.numel() * each.element_size() for each in lists[-1]) >= limit
    self.buckets += [Bucket(members, pgm.process_group_manager.dp_group) for members in lists]
    for bucket in self.buckets:
        for param in bucket.params:
            self.bucket_of[param] = bucket
'''),
    "buckets_in_order": Versions(
        wrong=[
            Wrong("a bucket does not wait for those before it", "            break\n", "            continue\n",
                  "the buckets launched after the gradients a in"),
            Wrong("only the bucket of this gradient is launched", "for each in self.buckets:", "for each in [bucket]:",
                  "the buckets launched after the gradients a in"),
            Wrong("buckets are sent in each micro-batch", "if not self.require_backward_grad_sync:", "if False:",
                  "in the first of two micro-batches"),
            Wrong("a bucket is launched again and again", "if each.handle is None:", "if True:", "rank 0: the buckets"),
            Wrong("all are launched at the end", "if each.awaited:", "if any(every.awaited for every in self.buckets):",
                  "in the last of two micro-batches"),
        ],
        right='''
def mark_param_as_ready(self, param):
    bucket = self.bucket_of[param]
    bucket.take(param)
    if self.require_backward_grad_sync:
        bucket.awaited -= {param}
        number = sum(each.handle is not None for each in self.buckets)
        while number < len(self.buckets) and not self.buckets[number].awaited:
            self.buckets[number].sync_gradient()
            number += 1
'''),
    "finish": Versions(
        wrong=[
            Wrong("buckets that lack a gradient are not launched", "        if bucket.handle is None:\n"
                  "            bucket.sync_gradient()\n", "", "NoneType"),
            Wrong("old numbers are sent", "bucket.views[param].zero_()", "bucket.views[param]", "second step"),
            Wrong("the gradient is not in the buffer", "bucket.views[param].zero_()", "torch.zeros_like(param)",
                  "second step"),
            Wrong("nobody waits", "bucket.wait()", "pass", "still being sent"),
            Wrong("a launched bucket is sent twice", "if bucket.handle is None:", "if True:", "do not match"),
        ],
        right='''
def finish_gradient_sync(self):
    for bucket in self.buckets:
        if bucket.handle is None:
            for param in bucket.params:
                if param.grad is None:
                    bucket.views[param].fill_(0)
                    param.grad = bucket.views[param]
            bucket.sync_gradient()
        bucket.wait()  # right: those behind it are launched a little later
'''),
}
