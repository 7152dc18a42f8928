"""Measure the machines, or plan for measured ones, or ask what other machines would do.

    torchrun ... cluster/plan.py --measure cluster.json                    on all machines, as train.py will be started
    python cluster/plan.py cluster.json --global_batch 32 --out plan.json  anywhere: the best pipelines for them
    torchrun ... step9_heterogeneous_pp/train.py --plan plan.json          as for --measure
    python cluster/plan.py --cluster 64xH100:8 --model_name ...            a table for machines that are not here

With --global_batch, --measure plans in the same go.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import os
import shlex

from planning import grids
from planning.machines import Cluster, load_cluster
from pipeline_parallel import afab, one_f_one_b
from planning.pipeline_simulation import Setting
from planning.report import as_plan, report, write_plan
from planning.planner import find_plans
from utils import TINY_LLAMA, ArgumentParser, UserError, choose_device, load_config, one_clear_error, positive_int

SCHEDULES = {"1f1b": one_f_one_b, "afab": afab}
MEASURED = {"model_name": TINY_LLAMA, "seq_len": 128, "dtype": "auto"}  # with --measure: a cluster.json has its own


def sizes(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


def fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 1, got {value}")
    return value


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster_json", nargs="?", help="the measured machines to plan for")
    parser.add_argument("--measure", metavar="PATH", help="measure the machines of this torchrun, write cluster.json")
    parser.add_argument("--cluster", metavar="64xH100:8", help="what would such a cluster do?")
    # Model: what is measured
    parser.add_argument("--model_name", default=None, help="a directory with a config.json, or a Hub id")
    parser.add_argument("--num_hidden_layers", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--num_attention_heads", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--num_key_value_heads", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--seq_len", type=positive_int, default=None, help="tokens in a sample (default: 128)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default=None)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--omp_num_threads", type=positive_int, default=None, help="threads a process")
    # The plan
    parser.add_argument("--global_batch", type=positive_int, help="samples a step (32); with --measure: plan too")
    parser.add_argument("--micro_batch_size", type=sizes, default=None, metavar="1,2,4",
                        help="sizes to measure, or to choose from (default: those measured)")
    parser.add_argument("--memory_fraction", type=fraction, default=0.9, help="of the free memory that may be used")
    parser.add_argument("--wire_dtype", choices=["float32", "bfloat16", "int8"], default=None,
                        help="of what stages send each other (default: the activation's)")
    parser.add_argument("--gradient_wire_dtype", choices=["float32", "bfloat16", "int8"], default=None,
                        help="of the gradients' sums (default: the gradient's)")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b")
    parser.add_argument("--out", default="plan.json", help="where to write the best plan")
    parser.add_argument("--top", type=positive_int, default=5, help="plans to print")
    grids.add_flags(parser)
    args = parser.parse_args()
    if sum(map(bool, (args.cluster_json, args.measure, args.cluster))) != 1:
        raise UserError("say what to do: --measure PATH under torchrun, or the cluster.json to plan for, or --cluster "
                         "with machines like 64xH100:8; one of the three")
    return args


def with_defaults(args) -> None:
    for name, value in MEASURED.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def measure(args) -> None:
    """Writes cluster.json. Every machine measures; rank 0 writes."""
    if "RANK" not in os.environ:
        raise UserError("--measure times the machines and their network: start it with torchrun on all of them, "
                         "as train.py will be")
    import torch
    import torch.distributed as dist

    import process_group_manager as pgm
    from planning.measure import MICRO_BATCH_SIZES, measure_cluster, write_cluster

    with_defaults(args)
    device, dtype, backend = choose_device(args.device, args.dtype)
    pgm.init_process_group(backend)
    if args.omp_num_threads:
        torch.set_num_threads(args.omp_num_threads)
    config = load_config(args.model_name, num_hidden_layers=args.num_hidden_layers,
                         num_attention_heads=args.num_attention_heads, num_key_value_heads=args.num_key_value_heads)
    wanted = tuple(args.micro_batch_size or MICRO_BATCH_SIZES)
    write_cluster(args.measure, measure_cluster(config, args.seq_len, dtype, device, args.model_name, wanted))
    if args.global_batch and dist.get_rank() == 0:
        args.cluster_json, args.micro_batch_size, args.dtype = args.measure, None, "auto"
        plan(args)
    dist.destroy_process_group()


def plan(args) -> None:
    cluster = load_cluster(args.cluster_json)
    for flag, measured in (("model_name", cluster.model_name), ("seq_len", cluster.seq_len), ("dtype", cluster.dtype),
                           ("num_hidden_layers", cluster.num_layers)):
        if getattr(args, flag) not in (None, "auto", measured):
            raise UserError(f"--{flag} {getattr(args, flag)}, but {args.cluster_json} was measured with {measured}: "
                             "leave the flag out, or measure again with it")
    setting = Setting(SCHEDULES[args.schedule], args.wire_dtype, args.gradient_wire_dtype)
    plans = find_plans(cluster, args.global_batch or 32, setting, args.micro_batch_size, args.memory_fraction)
    print(report(cluster, plans, args.top))
    write_plan(args.out, as_plan(cluster, plans.best[0], setting))
    print(f"plan: {args.out}\n{command(cluster, args)}")


def command(cluster: Cluster, args) -> str:
    """How to start the training that the plan is for, in the order of ranks in which the machines were measured."""
    train = ["step9_heterogeneous_pp/train.py", "--plan", args.out, "--model_name", cluster.model_name,
             "--num_hidden_layers", cluster.num_layers, "--seq_len", cluster.seq_len, "--dtype", cluster.dtype]
    train += ["--pp_engine", args.schedule] if args.schedule != "1f1b" else []
    hosts = [machine.host for machine in cluster.machines]
    if len(set(hosts)) == 1:
        return f"run it: torchrun --standalone --nproc_per_node {len(hosts)} {shlex.join(map(str, train))}"
    return (f"run it: cluster/launch_cluster.sh hosts.txt -- {shlex.join(map(str, train))}\n"
            f"     or: torchrun --nnodes {len(hosts)} --nproc_per_node 1 --node_rank K --master_addr {hosts[0]} "
            f"--master_port 29500 {shlex.join(map(str, train))}\n         with K = "
            + ", ".join(f"{rank} on {host}" for rank, host in enumerate(hosts)))


def main():
    args = parse_args()
    if args.measure:
        measure(args)
    elif args.cluster_json:
        plan(args)
    else:
        with_defaults(args)
        if args.micro_batch_size and len(args.micro_batch_size) > 1:
            raise UserError("--cluster takes one --micro_batch_size, or none")
        print(grids.what_if(args, Setting(SCHEDULES[args.schedule], args.wire_dtype, args.gradient_wire_dtype)))


if __name__ == "__main__":
    with one_clear_error():
        main()
