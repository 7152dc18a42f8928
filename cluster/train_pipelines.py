"""Step 9's train.py on unlike machines and slow links, with all its flags: a plan decides what runs where.

    torchrun ... cluster/train_pipelines.py --plan plan.json               started as plan.py --measure was
    torchrun --nproc_per_node 3 cluster/train_pipelines.py --pipelines "3,3,2" --wire_dtype int8

The plan's machines are the ranks of the training, in its order. Machines that it leaves out wait until the end.
"""

import course  # noqa: F401  before step 9's modules

import argparse

import train
from training.compression import WIRE_DTYPES, compress
from training.plan_file import FLAGS, follow_plan, take_places
from utils import UserError, one_clear_error


def main():
    parser, plan = None, {}

    def add_flags(of_train: argparse.ArgumentParser) -> None:
        nonlocal parser
        parser = of_train
        parser.add_argument("--plan", metavar="PLAN.JSON", help="pipelines and schedule that cluster/plan.py chose")
        parser.add_argument("--wire_dtype", choices=WIRE_DTYPES, help="what stages send hidden states and gradients as")
        parser.add_argument("--gradient_wire_dtype", choices=WIRE_DTYPES, help="what pipelines send gradients as")

    def arrange(args, store, rank: int, world_size: int) -> tuple[int, int]:
        """As init_process_group's `arrange`: the rank and the world size."""
        if args.plan is None:
            return rank, world_size
        parser.set_defaults(**dict.fromkeys(FLAGS))  # what the command line does not give is None below
        if given := [name for name in FLAGS if getattr(parser.parse_args(), name) is not None]:
            raise UserError(f"--plan says what runs where: leave out --{', --'.join(given)}")
        found, *place = take_places(args.plan, store, rank, world_size)
        plan.update(found)
        return tuple(place)

    def make_model(args, dtype, device):
        model, weights, criterion = train.make_llama(args, dtype, device)
        if plan:
            follow_plan(args, plan, model.config, str(dtype).removeprefix("torch."))
        return model, weights, criterion

    def make_plugin(args, model):
        plugin = train.make_plugin(args, model)
        compress(plugin, model.config, args.wire_dtype, args.gradient_wire_dtype)
        return plugin

    train.main(__doc__, make_model, add_flags, make_plugin, arrange=arrange)


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, lower --micro_batch_size, or raise --tp_size or --pp_size"):
        main()
