"""Faults of pipelines: stages, chunks, messages between stages, process groups, and ranks that part from each other."""

from museum.fault import Fault

TIED = (("train.py", '    with torch.device("meta"):',
         '    config.tie_word_embeddings = True\n    with torch.device("meta"):'),)
WAIT_AT_ONCE = (("data_parallel.py", '        self.handle = timeline.background(handle, "all-reduce")\n',
                 '        self.handle = timeline.background(handle, "all-reduce")\n        handle.wait()\n'),)
NO_ASSERTION = ("data_parallel.py", 'assert bucket.handle is None, "call finish_gradient_sync() after the last '
                'backward, or replicas drift apart"', "if bucket.handle is not None:\n            return")
SYNC = "            model.require_backward_grad_sync = i == num_microbatches - 1\n"

FAULTS = (
    Fault("gaps", "7 --pp_size 3",
          "A stage's first layer is its rank times its own number of layers: gaps and repeats.",
          ("ml-explore/mlx-lm#1816", "ml-explore/mlx-lm#1688"),
          (("pipeline_parallel.py", 'torch.arange(num_layers, device="cpu").tensor_split(grid.pp_world_size)'
            '[grid.pp_rank].tolist()', 'range(grid.pp_rank * (size := -((grid.pp_rank - num_layers) // '
            'grid.pp_world_size)), (grid.pp_rank + 1) * size)'),),
          {"numbers": ("decoder_layers.3", "no rank has")}),
    Fault("offset", "7 --pp_size 2", "Stages count their layers from 0 without an offset: all hold the first layers.",
          ("huggingface/transformers#24381",),
          (("pipeline_parallel.py", "tensor_split(grid.pp_world_size)[grid.pp_rank].tolist()",
            "tensor_split(grid.pp_world_size)[0].tolist()"),),
          {"numbers": ("decoder_layers.2", "no rank has")}),
    Fault("alike", "7 --pp_size 2",
          "Every stage draws from the same seed: its layers begin as those of the first stage.",
          ("Modalities/modalities#426", "pytorch/pytorch#139304"),
          (("model.py", "import hashlib\n", "import hashlib\nimport re\n"),
           ("model.py", 'f"{seed} {name}".encode()', 'f"{seed} ".encode() + re.sub("[0-9]+", lambda i: str('
            'int(i[0]) % len(model.decoder_layers)), name).encode()')),
          {"numbers": ("decoder_layers.2", "another seed")}),
    Fault("copies", "7 --pp_size 2", "The gradient norm counts a tied embedding on the first and on the last stage.",
          ("NVIDIA/Megatron-LM#7228", "NVIDIA/Megatron-LM#7227"),
          (("tensor_parallel.py", '(grid.pp_is_first_stage or name != "embedding.weight") and ', ""),),
          {"numbers": ("gradient norm", "embedding.weight is counted 2 times")}, TIED),
    Fault("swapped", "11 --pp_size 2 --virtual_stages 2 --pp_engine interleaved",
          "Both neighbours are one rank, and all messages one group: outputs and gradients change places.",
          ("NVIDIA/Megatron-LM#5271", "NVIDIA/Megatron-LM#1450"),
          (("pipeline_parallel.py", "return rank, groups[action.kind][chunk != action.chunk]",
            "return rank, grid.pp_group"),
           ("pipeline_parallel.py", 'for upcoming in (action for action in actions[k : k + 1 + '
            'communication.receives_ahead] if action.kind != "W"):', "for upcoming in sorted(actions[k : k + 1 "
            "+ communication.receives_ahead]):")),
          {"numbers": "the loss is wrong already"}),
    Fault("armed", "8 --dp_size 2 --pp_size 2",
          "The last forward arms the all-reduce, which an earlier backward starts.",
          ("meta-pytorch/torchrec#4758",),
          (("pipeline_parallel.py", SYNC, ""),
           ("pipeline_parallel.py", '        if action.kind == "F":\n', '        if action.kind == "F":\n' + SYNC),
           NO_ASSERTION),
          {"numbers": (r"ranks \[0, 2\]", "never averaged over ranks"), "types": "P is added to R on axis dp"},
          WAIT_AT_ONCE),
    Fault("repeated", "8 --pp_size 2", "Micro-batches are not sliced: each of a step is the first one again.",
          ("ooples/AiDotNet#845",),
          (("pipeline_parallel.py", "    model.peak_live_activations = 0\n",
            "    model.peak_live_activations = 0\n    data_loader.first = None\n"),
           ("pipeline_parallel.py", '    x = batch["input_ids"] if', "    batch = data_loader.first = "
            "data_loader.first or batch\n"
            '    x = batch["input_ids"] if')),
          {"numbers": ("samples", "3 of 4 are read by nobody")}),
    Fault("wiped", "8 --pp_size 2",
          "The stage is prepared anew before each backward, which drops the gradients so far.",
          ("NVIDIA-NeMo/Automodel#3530",), (("pipeline_parallel.py", SYNC, SYNC + "            model.zero_grad()\n"),),
          {"numbers": ("gradients", r"zero_grad\(\) called in between")}),
    Fault("halves", "10 --dp_size 2 --pp_size 2 --pp_engine zb",
          "The last B counts for the last backward: an all-reduce begins before the last W.",
          ("pytorch/pytorch#139415",),
          (("pipeline_parallel.py", "model.require_backward_grad_sync = i == num_microbatches - 1",
            'model.require_backward_grad_sync = ("B", num_microbatches - 1) in actions[: k + 1]'), NO_ASSERTION),
          {"numbers": ("decoder_layers.2", "never averaged over ranks")}, WAIT_AT_ONCE),
    Fault("divisor", "7 --dp_size 2 --pp_size 2",
          "The loss that is logged is divided by all ranks, not by the replicas.",
          ("Modalities/modalities#399",),
          (("data_parallel.py", "loss /= grid.dp_world_size", "loss /= grid.world_size"),),
          {"numbers": "loss, of gradients that are right: .* 2 times too small"}),
    Fault("wires", "7 --pp_size 2", "The first message between stages is received in a type other than it is sent.",
          ("pytorch/pytorch#165539",),
          (("pipeline_parallel.py", "dist.recv(token, grid.pp_prev_rank", "dist.recv(token.long(), "
            "grid.pp_prev_rank"),),
          {"messages": "torch.float32 to rank 1, which expects 1 of torch.int64"}),
    Fault("peers", "7 --dp_size 2 --pp_size 2",
          "Messages go to the rank whose number is the stage, whatever the replica.",
          ("OpenPipe/ART#919", "microsoft/onnxruntime#5815"),
          (("process_group_manager.py", "stages[self.pp_rank - 1].item()", "self.pp_rank - 1"),
           ("process_group_manager.py", "stages[self.pp_rank + 1].item()", "self.pp_rank + 1")),
          {"messages": r"receive from rank 0 in the group of the ranks \[2, 3\]"}),
    Fault("creation", "7 --dp_size 2 --pp_size 2",
          "Ranks make only their own groups, as if the others need not take part.",
          ("NVIDIA-NeMo/Megatron-Bridge#4985",),
          (("process_group_manager.py", "timeout, use_local_synchronization=True)", "timeout)"),),
          {"messages": "all ranks have to make all groups"}),
    Fault("uneven", "5 --dp_size 2", "Each replica counts its steps by its own samples: the one with fewer ends early.",
          ("GMISWE/tinker-cloud#30", "argonne-lcf/dlio_benchmark#339"),
          (("train.py", "    for step in range(1, num_steps + 1):",
            "    for step in range(1, num_steps + 1 - grid.dp_rank):"),),
          {"messages": "can't come: those ranks have ended"}),
    Fault("stops", "7 --pp_size 2", "Only the stage that knows the loss stops early: the others wait for it for ever.",
          ("talmolab/sleap-nn#471", "isi-nlp/rtg#11"),
          (("train.py", "        scheduler.step()\n", "        scheduler.step()\n        if 0 < loss.item() < 100:\n"
            "            break\n"),),
          {"messages": "can't come: those ranks have ended"}),
    Fault("skips", "5 --dp_size 2", "A replica without valid tokens skips the backward that would sum its gradients.",
          ("NVIDIA-NeMo/Automodel#2468",),
          (("train.py", "        if torch.is_grad_enabled():", "        if torch.is_grad_enabled() and "
            "(i < num_microbatches - 1 or pgm.process_group_manager.dp_rank == 0):"),),
          {"messages": r"rank 1 calls all_reduce SUM \[\]"}),
    Fault("onesided", "7 --pp_size 2",
          "Only the first stage sums the tied embedding's gradient, and waits for the last.",
          ("dylanyunlon/Neuron_SP#51",),
          (("pipeline_parallel.py", "    if stage.config.tie_word_embeddings and stage.embedding is not None:",
            "    if stage.config.tie_word_embeddings and pgm.process_group_manager.pp_is_first_stage:"),),
          {"messages": "embedding.weight.grad, group=pgm.process_group_manager.pp_ends_group"}, TIED),
    Fault("deferred", "10 --dp_size 2 --pp_size 2 --pp_engine zb",
          "The last postponed gradients are computed behind the all-reduce: each replica adds its own.",
          ("NVIDIA/Megatron-LM#1012",),
          (("pipeline_parallel.py", "        else:\n            with timeline.span(\"weight gradients\"",
            "        elif i < num_microbatches - 1:\n            with timeline.span(\"weight gradients\""),
           ("pipeline_parallel.py", "        model.finish_gradient_sync()\n", "        model.finish_gradient_sync()\n"
            "        model.require_backward_grad_sync = False\n        for entries in alive.values():\n"
            "            weight_gradients.add_weight_gradients(entries, model)\n")),
          {"numbers": ("decoder_layers.2", "never averaged over ranks")}),
    Fault("chunks", "11 --pp_size 2 --virtual_stages 2 --pp_engine interleaved",
          "Backward takes a rank's chunks in the order of forward: the first one waits for the last for ever.",
          ("pytorch/PiPPy#957", "yuyangJin/PerFlow-AI#38"),
          (("virtual_stages.py", "else reversed(range(num_chunks))", "else range(num_chunks)"),),
          {"schedule": "before B0 it waits for b0 of its own", "messages": "They wait in a circle"}),
    Fault("fewer", "13 --dp_size 2 --zero 3",
          "A rank that drops samples runs a micro-batch less, and gathers fewer weights.",
          ("lightseekorg/TorchSpec#126", "dylanyunlon/Neuron_SP#591"),
          (("pipeline_parallel.py", "pgm.process_group_manager, data_loader.gradient_accumulation_steps\n",
            "pgm.process_group_manager, data_loader.gradient_accumulation_steps\n"
            "    num_microbatches -= grid.dp_rank\n"),),
          {"messages": r"line \d+: dist.all_reduce\(loss"}),
    Fault("shared", "10 --pp_size 2 --pp_engine zb", "Divided backward adds the gradient of a shared weight twice.",
          ("pytorch/pytorch#181365",),
          (("weight_gradients.py", "        grad, x = grad.flatten(0, -2).t(), x.flatten(0, -2)",
            "        if model.module.embedding and weight is model.module.embedding.weight:\n            grad = 2 * "
            "grad\n        grad, x = grad.flatten(0, -2).t(), x.flatten(0, -2)"),),
          {"numbers": "gradients, embedding.weight: wrong"}, TIED),
    Fault("resent", "8 --pp_size 2", "The first stage sends the tied embedding to the last one for each micro-batch.",
          ("alpa-projects/alpa#324",),
          (("pipeline_parallel.py", "        i, received = action.microbatch, communication.receive(action)\n",
            '        if action.kind == "F" and model.module.embedding is not None:\n            dist'
            ".broadcast(model.module.embedding.weight.data, grid.ranks[grid.dp_rank, 0, grid.tp_rank].item(), "
            "grid.pp_ends_group)\n"
            "        i, received = action.microbatch, communication.receive(action)\n"),),
          {"bytes": "times as many", "types": "missing axis pp"}, TIED),
    Fault("cooldown", "8 --dp_size 2 --pp_size 2", "Only a cool-down averages gradients, and the last stage has none.",
          ("huggingface/picotron#5",),
          (("pipeline_parallel.py", "= i == num_microbatches - 1\n", "= i == num_microbatches - 1 and not "
            "grid.pp_is_last_stage\n"),
           ("pipeline_parallel.py", "        model.finish_gradient_sync()\n",
            "        if not grid.pp_is_last_stage:\n            model.finish_gradient_sync()\n")),
          {"numbers": (r"ranks \[1, 3\]", "never averaged over ranks"), "bytes": "rank 1 sends .*: 0.016"}),
    Fault("unasked", "7 --pp_size 2", "The first stage sends the targets and waits, the last one first takes "
            "its input.",
          ("tdrussell/diffusion-pipe#409",),
          (("pipeline_parallel.py", '    x = batch["input_ids"] if', "    if grid.pp_is_first_stage:\n"
            '        dist.send(batch["target_ids"], grid.pp_next_rank, grid.pp_ends_group)\n    else:\n'
            '        dist.recv(batch["target_ids"], grid.pp_prev_rank, grid.pp_ends_group)\n'
            '    x = batch["input_ids"] if'),),
          {"messages": r"send to rank 1, shape \[1, 16\]\n"}),
    Fault("parts", "11 --pp_size 2 --virtual_stages 2 --pp_engine interleaved",
          "Each chunk is clipped by the norm of its own gradients, not by that of the whole model.",
          ("pytorch/torchtitan#649",),
          (("train.py", "grad_norm = clip_grad_norm(model.module, args.max_grad_norm)",
            "stage = model.module; chunks = [[stage.embedding] * stage.is_first(c) + [stage.decoder_layers[str(i)] "
            "for i in layers] + [stage.final_norm, stage.final_proj] * stage.is_last(c) for c, layers in enumerate("
            "stage.chunks)]\n            grad_norm = max(clip_grad_norm(torch.nn.ModuleList(chunk), "
            "args.max_grad_norm) for chunk in chunks)"),),
          {"numbers": ("gradients", "clipped by another norm"), "bytes": "rank 0 sends 196,648 bytes"}),
    Fault("newest", "7 --pp_size 2",
          "A stage keeps the newest backward's result only, so what it sends later is this one.",
          ("pytorch/pytorch#139404",),
          (("pipeline_parallel.py", "    model.peak_live_activations = 0\n",
            "    model.peak_live_activations = 0\n    late = []\n"),
           ("pipeline_parallel.py", "            communication.send(action, gradient)\n",
            "            late.append(action)\n"),
           ("pipeline_parallel.py", "    communication.finish()\n    if", "    for action in late:\n        "
            "communication.send(action, gradient)\n    communication.finish()\n    if")),
          {"numbers": r"parameters of ranks \[0\]: wrong"}),
    Fault("emptied", "7 --pp_size 2",
          "to_empty() loses the rotary tables, which are buffers that no checkpoint brings back.",
          ("NVIDIA-NeMo/Automodel#363", "pytorch/torchtitan#201"),
          (("pipeline_parallel.py", "        for layer in self.decoder_layers.values():\n",
            "        cos, sin = torch.zeros_like(cos), torch.zeros_like(sin)  # what memory may hold\n"
            "        for layer in self.decoder_layers.values():\n"),),
          {"numbers": "k_proj.weight: ranks have none"}),
)
