"""Wrong and right answers to the exercises of step 6."""

from versions import Versions, Wrong

VERSIONS = {
    "buckets_in_order": Versions(
        wrong=[
            Wrong("a bucket does not wait for those before it", "            break\n", "            continue\n",
                  "the gradients a have arrived"),
            Wrong("only the bucket of this gradient is launched", "for each in self.buckets:", "for each in [bucket]:",
                  "the gradients a have arrived"),
            Wrong("buckets are sent in each micro-batch", "if not self.require_backward_grad_sync:", "if False:",
                  "In the first of two micro-batches"),
            Wrong("three buckets always", "in self.buckets:", "in self.buckets[:3]:", "[0, 1, 2]"),
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
}
