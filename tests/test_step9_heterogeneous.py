"""Step 9's pipelines of unlike shapes train one model. Their math is in same_math."""

from lab.launch import MODELS


def test_ranks_that_made_unlike_models_train_that_of_rank_0(run_code):
    """A script without a seed, or a new head: over pipelines and tp ranks, frozen parameters and buffers too."""
    out = run_code(9, 4, '''
import torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from tensor_parallel import split_parameter
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
def make(seed, width=8, head=0):
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=width, n_head=2, vocab_size=16, tie_word_embeddings=False))
    model.transformer.wpe.requires_grad_(False)
    model.transformer.register_buffer("scale", torch.rand(3))
    model.lm_head.weight.data.add_(head)
    return model
plugin = HeterogeneousParallelPlugin(tp_size=2, device="cpu", precision="fp64")
rank = dist.get_rank()
for case in (lambda rank: make(rank), lambda rank: make(0, head=rank), lambda rank: make(0, width=8 + 2 * (rank > 2))):
    model = case(rank)
    one_stage = PipelineTemplate.from_layers_per_stage(model, [2])
    plugin.set_pipelines([one_stage, one_stage], [1, 1])
    try:
        stage = plugin.configure(model, torch.optim.SGD(model.parameters()))[0].module.model
    except ValueError as error:
        print(f"<{rank} {error}>", flush=True)
        continue
    expected, off = case(0).double(), 0
    for name, param in [*stage.named_parameters(), *stage.named_buffers()]:
        module, _, key = name.rpartition(".")
        whole = dict([*expected.named_parameters(), *expected.named_buffers()])[name].detach()
        off += not torch.equal(param, split_parameter(stage.get_submodule(module), key, whole))
    print(f"<{rank} {off}>", flush=True)
''', modules=MODELS, timeout=60).stdout
    assert all(out.count(f"<{rank} 0>") == 2 for rank in range(4)), out
    assert "12 of 30 parameters and buffers were unlike on some ranks" in out and "\n1 of 30 parameters and" in out, out
    assert all(f"<{rank} rank 3 has another model than rank 0: only one of them has lm_head" in out for rank in range(4)), out
