"""How much memory a stage needs while it reads its weights. `weights_memory.py FOLDER CLASS SHARD_SIZE SIZES`

SIZES is the JSON of the configuration. Prints, for each of three stages, the largest memory that is no file's (RssAnon)
over what its parameters take.
"""

import json
import os
import sys
import threading
import time

import torch
import transformers
from families import PipelineStage, PipelineTemplate, load_weights, pgm


class Alone:
    tp_world_size, tp_rank = 1, 0


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def load(make, layers: int, stage_index: int, folder: str) -> None:
    """Prints the ratio for one stage."""
    with torch.device("meta"):
        model = make()
    stage = PipelineStage(model, PipelineTemplate.from_layers_per_stage(model, [layers // 3] * 3), stage_index)
    before, seen, ended = anonymous_bytes(), [], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.append(anonymous_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    load_weights(stage, folder)
    ended.set()
    thread.join()
    seen.append(anonymous_bytes())
    print((max(seen) - before) / sum(param.nbytes for param in stage.model.parameters()), flush=True)


def main(folder: str, class_name: str, shard_size: str, sizes: str) -> None:
    pgm.process_group_manager = Alone()
    torch.set_num_threads(1)  # forked processes may use no threads of their parent
    model_class = getattr(transformers, class_name)
    make = lambda: model_class(model_class.config_class(**json.loads(sizes)))  # noqa: E731
    for action in (lambda: make().save_pretrained(folder, max_shard_size=shard_size),
                   *(lambda k=k: load(make, json.loads(sizes)["num_hidden_layers"], k, folder) for k in range(3))):
        if (child := os.fork()) == 0:  # each in a process of its own, so that nothing is left in memory
            action()
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
