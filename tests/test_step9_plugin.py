"""Step 9's plugin and scripts, used wrongly: one clear error each. In one process, a world of one."""

import pytest
import torch
import torch.distributed as dist
from lab.huggingface import run_chain
from lab.program import Program
from support.families import HeterogeneousParallelPlugin, PipelineTemplate, listed_modules, stages_of, toy

STEP = Program(9).load()


@pytest.fixture
def make_plugin():
    """make_plugin(**options): of a world of one, before set_pipelines."""
    yield lambda precision="fp64", **options: HeterogeneousParallelPlugin(device="cpu", precision=precision, **options)
    dist.destroy_process_group()


@pytest.fixture
def plugin(make_plugin):
    return make_plugin()


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(i, i + 6)} for i in range(count)]


def one_stage(model) -> PipelineTemplate:
    return PipelineTemplate.from_layers_per_stage(model, [len(listed_modules(model)[1])])


def configured(plugin, model, num_microbatches: int = 1, params=None):
    """What configure() returns for one stage and SGD on `params`, with a loader of as many samples as a step takes."""
    plugin.set_pipelines([one_stage(model)], [num_microbatches])
    loader = plugin.prepare_dataloader(samples(num_microbatches * plugin.microbatch_size))
    return plugin.configure(model, torch.optim.SGD(params or model.parameters()), loader)


def mean_logit(output, batch) -> torch.Tensor:
    return output.logits.mean()


def test_calls_before_set_pipelines(plugin):
    model = toy("gpt2")
    calls = {"prepare_dataloader": lambda: plugin.prepare_dataloader(samples(4)),
             "configure": lambda: plugin.configure(model, torch.optim.SGD(model.parameters())),
             "execute_pipeline": lambda: plugin.execute_pipeline(iter([]), model, mean_logit, None)}
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name} needs the pipelines: call set_pipelines first"):
            call()


def test_what_execute_pipeline_takes(plugin):
    stage, optimizer, loader = configured(plugin, toy("gpt2"), 2)
    with pytest.raises(ValueError, match="an iterator, but a HeterogeneousDataLoader is none: write batches = iter"):
        plugin.execute_pipeline(loader, stage, mean_logit, optimizer)
    with pytest.raises(ValueError, match="the model that configure returns, but got a GPT2LMHeadModel"):
        plugin.execute_pipeline(iter(loader), toy("gpt2"), mean_logit, optimizer)
    batches = iter(loader)  # of one step
    assert plugin.execute_pipeline(batches, stage, mean_logit, optimizer).dtype == torch.float64
    with pytest.raises(ValueError, match="an epoch has dataloader.steps_per_epoch optimizer steps.* batches = iter"):
        plugin.execute_pipeline(batches, stage, mean_logit, optimizer)


def test_configure_keeps_the_optimizers_groups_and_settings(plugin):
    model = toy("gpt2")
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    names = {name for name, param in model.named_parameters() if param.dim() > 1}
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 0.5}], lr=0.2,
                                  betas=(0.8, 0.7))
    plugin.set_pipelines([one_stage(model)], [3])
    _, made, _ = plugin.configure(model, optimizer)
    first, second = made.param_groups
    assert (first["lr"], first["weight_decay"], second["lr"], second["weight_decay"]) == (0.2, 0.3, 0.5, 0.01)
    assert first["betas"] == second["betas"] == made.defaults["betas"] == (0.8, 0.7)
    assert set(first["param_names"]) == names and not names & set(second["param_names"])
    assert len(first["params"] + second["params"]) == len(decayed + others)


@pytest.mark.parametrize("schedule, peak", [(STEP.pipeline_parallel.afab, 3), (None, 1)])
def test_the_schedule_and_no_loss(make_plugin, schedule, peak):
    plugin = make_plugin(**({"schedule": schedule} if schedule else {}))
    stage, optimizer, loader = configured(plugin, toy("gpt2"), 3)
    assert plugin.execute_pipeline(iter(loader), stage, mean_logit, optimizer, return_loss=False) is None
    gradients = [param.grad.clone() for param in stage.parameters()]
    assert plugin.execute_pipeline(iter(loader), stage, mean_logit, optimizer) is not None
    assert all(torch.equal(param.grad, old) for param, old in zip(stage.parameters(), gradients, strict=True))
    assert stage.peak_live_activations == peak


def test_buffers_with_values_keep_them(plugin):
    """They are in no state dict, and a model that was loaded with others would otherwise get the configuration's."""
    model = toy("llama")
    frequencies = model.model.rotary_emb.inv_freq.mul_(2).clone()
    stage, _, _ = configured(plugin, model)
    assert torch.equal(stage.module.model.model.rotary_emb.inv_freq, frequencies)


def test_buckets_are_launched_in_order(plugin):
    """Whatever arrives first: ranks that launch in unlike orders would sum what does not belong together."""
    wrapper, _, _ = configured(plugin, toy("gpt2"))
    first, second = params = list(wrapper.parameters())[:2]
    wrapper.buckets = [STEP.data_parallel.Bucket([param], dist.group.WORLD) for param in params]
    wrapper.bucket_of = dict(zip(params, wrapper.buckets, strict=True))
    for param, launched in ((second, [False, False]), (first, [True, True])):
        param.grad = torch.ones_like(param)
        wrapper.mark_param_as_ready(param)
        assert [bucket.handle is not None for bucket in wrapper.buckets] == launched
    wrapper.finish_gradient_sync()


def test_what_configure_refuses(make_plugin):
    with pytest.raises(ValueError, match="precision='fp16' is none of auto, float32, bfloat16, float64"):
        make_plugin("fp16")
    with torch.device("meta"):
        model = toy("gpt2")
    with pytest.raises(ValueError, match=r"on the meta device and has no weights: pass configure\(weights=...\)"):
        configured(plugin := make_plugin(), model)
    with pytest.raises(ValueError, match="^41 of 41 parameters of the optimizer's group 0 are not the model's"):
        configured(plugin, toy("gpt2"), params=toy("gpt2").parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # transformers annotates the **kwargs of one of them
def test_what_forward_takes_by_other_names_reaches_every_stage(name):
    """The arguments of packed samples, for instance, go through **kwargs. What only the criterion reads does not."""
    batch = {"input_ids": torch.arange(10)[None], "cu_seq_lens_q": torch.tensor([0, 4, 10]), "max_length_q": 6,
             "target_ids": torch.arange(10)[None], "labels": torch.arange(10)[None]}
    seen, stages = [], stages_of(lambda: toy(name), [1, 2])
    for stage in stages:
        stage.own_layers()[-1].register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    run_chain(stages, batch)
    assert len(seen) == 2 and all(kwargs["cu_seq_lens_q"] is batch["cu_seq_lens_q"] for kwargs in seen)
    assert all(kwargs["max_length_q"] == 6 and not kwargs.keys() & {"target_ids", "labels"} for kwargs in seen)


@pytest.mark.parametrize("precision, matmul, master", [
    ("bfloat16", torch.bfloat16, torch.float32), ("float64", torch.float64, torch.float64)])
def test_the_precision_of_hugging_faces_models(make_plugin, precision, matmul, master):
    plugin, seen = make_plugin(precision), []
    stage, optimizer, loader = configured(plugin, toy("gpt2").float())
    stage.module.model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda m, x, out: seen.append(out.dtype))
    plugin.execute_pipeline(iter(loader), stage, mean_logit, optimizer)
    assert seen == [matmul] and {tensor.dtype for p in stage.parameters() for tensor in (p, p.grad)} == {master}
