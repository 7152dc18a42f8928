"""Measure the machines, or plan for measured ones. tools/what_if.py plans for machines that are not here.

    torchrun ... cluster/plan.py --measure cluster.json                    on all machines, as training will be started
    python cluster/plan.py cluster.json --global_batch 32 --out plan.json  anywhere: the best pipelines for them
    torchrun ... cluster/train_distributed.py --plan plan.json             as for --measure

With --global_batch, --measure plans in the same go. The model is a Llama or any causal model of transformers, with
--lora_rank its adapters. No machine has to hold it: modules are measured one at a time.
"""

from ranks import course  # noqa: F401  before step 9's modules

import contextlib
import json
import os
import shlex
import signal

import torch.distributed as dist

from models.causal import OVERRIDES, make_model
from models.lora import add_lora_flags, check_lora_flags
from planning.machines import Cluster, Setting, load_cluster
from planning.measure import MICRO_BATCH_SIZES, describe_machines, measure_with
from planning.plan_file import as_plan, report
from planning.profiler import LayerProfiler
from planning.schedules import SCHEDULES
from planning.search import find_plans
from ranks.collectives import once
from ranks.errors import one_error_of_all
from ranks.files import replace
from ranks.join import meet, require_one_dtype
from ranks.memory import USABLE_MEMORY
from ranks.placement import home_rank, is_home
from utils import TINY_LLAMA, ArgumentParser, UserError, number, positive_int

LORA = ("lora_rank", "lora_alpha", "lora_targets", "base_bits")
MEASURED = {"model_name": TINY_LLAMA, "seq_len": 128, "dtype": "auto"}  # with --measure: a cluster.json has its own


def positive_ints(text: str) -> list[int]:
    return [positive_int(part) for part in text.split(",")]


share_of_memory = number(float, lambda value: 0 < value <= 1, "more than 0 and at most 1")


def add_model_flags(parser, what_names: str = "a directory with a config.json, or a Hub id") -> None:
    parser.add_argument("--model_name", default=None, help=what_names)
    for name in OVERRIDES:
        parser.add_argument(f"--{name}", type=positive_int, default=None, help="instead of the model's own")
    parser.add_argument("--seq_len", type=positive_int, default=None, help="tokens in a sample (default: 128)")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float64"], default=None)


def add_search_flags(parser) -> None:
    parser.add_argument("--global_batch", type=positive_int, help="samples a step (32); with --measure: plan too")
    parser.add_argument("--micro_batch_size", type=positive_ints, default=None, metavar="1,2,4",
                        help="sizes to measure, or to choose from (default: those measured)")
    parser.add_argument("--memory_fraction", type=share_of_memory, default=USABLE_MEMORY,
                        help="of the free memory that may be used")
    parser.add_argument("--wire_dtype", choices=["float32", "bfloat16", "int8"], default=None,
                        help="of what stages send each other (default: the activation's)")
    parser.add_argument("--gradient_wire_dtype", choices=["float32", "bfloat16", "int8"], default=None,
                        help="of the gradients' sums (default: the gradient's)")
    parser.add_argument("--schedule", choices=["auto", *SCHEDULES], default="auto",
                        help="auto: 1f1b, with more micro-batches in flight (1f1b-2, -3, -4) where links are slow")
    parser.add_argument("--recompute", action="store_true", help="plan for training with --recompute: less memory")
    parser.add_argument("--top", type=positive_int, default=5, help="plans to print")


def parse_args():
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cluster_json", nargs="?", help="the measured machines to plan for")
    parser.add_argument("--measure", metavar="PATH", help="measure the machines of this torchrun, write cluster.json")
    parser.add_argument("--measure_seconds", type=positive_int, default=30, help="how long that takes, about")
    add_model_flags(parser)  # what is measured
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", choices=["auto", "gloo"], default="auto", help="as in train_distributed.py")
    add_lora_flags(parser)
    add_search_flags(parser)
    parser.add_argument("--out", default="plan.json", help="where to write the best plan")
    args = parser.parse_args()
    if bool(args.cluster_json) == bool(args.measure):
        raise UserError("say what to do: --measure PATH under torchrun, or the cluster.json to plan for; one of the "
                        "two")
    if args.lora_rank and not args.measure:
        raise UserError("--lora_rank is for --measure: a cluster.json says what was measured, leave the flag out")
    args.tp_size = 1
    check_lora_flags(args)
    return args


def measure(args) -> None:
    """Writes cluster.json on the machine that starts it. Every machine measures."""
    if "RANK" not in os.environ:
        raise UserError("--measure times the machines and their network: start it with torchrun on all of them, "
                        "as the training will be")
    for name, value in MEASURED.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.seed = 0  # does not matter here
    device, dtype = meet(args)
    require_one_dtype(dtype)
    once(home_rank(), lambda: [check_writable("--measure", args.measure), check_writable("--out", args.out)])
    made = make_model(args, dtype)
    wanted = tuple(args.micro_batch_size or MICRO_BATCH_SIZES)
    profiler = LayerProfiler(made.model, args.seq_len, dtype, device, made.lora, made.criterion)
    cluster = measure_with(profiler, args.model_name, wanted, args.measure_seconds, args.measure_seconds / 8)
    if is_home():
        names = (*OVERRIDES, "device", *(LORA if args.lora_rank else ()))
        flags = {name: getattr(args, name) for name in names}
        cluster["flags"] = {name: value for name, value in flags.items() if value not in (None, "auto")}
        write("--measure", args.measure, cluster)
        print(f"{describe_machines(cluster, wanted)}\ncluster: {args.measure}", flush=True)
        if args.global_batch:
            args.cluster_json, args.micro_batch_size, args.dtype = args.measure, None, "auto"
            plan(args)
    dist.destroy_process_group()


def plan(args) -> None:
    cluster = load_cluster(args.cluster_json)
    measured = {**cluster.model, "model_name": cluster.model_name, "seq_len": cluster.seq_len, "dtype": cluster.dtype}
    for flag in ("model_name", "seq_len", "dtype", *OVERRIDES):
        if getattr(args, flag) not in (None, "auto", measured[flag]):
            raise UserError(f"--{flag} {getattr(args, flag)}, but {args.cluster_json} was measured with "
                            f"{measured[flag]}: leave the flag out, or measure again with it")
    setting = Setting(args.schedule, args.wire_dtype, args.gradient_wire_dtype, args.recompute)
    plans = find_plans(cluster, args.global_batch or 32, setting, args.micro_batch_size, args.memory_fraction)
    write("--out", args.out, as_plan(cluster, plans.best[0]))  # before printing, which `| head` may end
    print(f"{report(cluster, plans, args.top)}\nplan: {args.out}\n{command(cluster, args)}")


def command(cluster: Cluster, args) -> str:
    """How to start the training that the plan is for, in the order of ranks in which the machines were measured."""
    train = ["cluster/train_distributed.py", "--plan", args.out, "--model_name", cluster.model_name, "--seq_len",
             cluster.seq_len, "--dtype", cluster.dtype]
    train += [word for name, value in cluster.flags.items() for word in (f"--{name}", value)]
    words, hosts = shlex.join(map(str, train)), cluster.hosts
    if len(set(hosts)) == 1:
        return f"run it: torchrun --standalone --nproc_per_node {len(hosts)} {words}"
    return (f"run it: cluster/launch_cluster.sh hosts.txt -- {words}\n"
            f"     or: torchrun --nnodes {len(hosts)} --nproc_per_node 1 --node_rank K --master_addr {hosts[0]} "
            f"--master_port 29500 {words}\n         with K = "
            + ", ".join(f"{rank} on {host}" for rank, host in enumerate(hosts)))


def check_writable(flag: str, path: str) -> None:
    """Makes the file's folder. Raises UserError where the file can't be written, before what it is to hold is made."""
    folder = os.path.dirname(path) or "."
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        if not os.path.isdir(path) and os.access(path if os.path.exists(path) else folder, os.W_OK):
            return
    raise UserError(f"{flag} {path!r} can't be written: choose another path")


def write(flag: str, path: str, content: dict) -> None:
    try:
        replace(path, json.dumps(content, indent=1))
    except OSError as error:
        why = f"{flag} {path!r} can't be written ({error.strerror})"
        raise UserError(f"{why}: make room, or choose another path") from None


def main():
    args = parse_args()
    if args.measure:
        measure(args)
    else:
        check_writable("--out", args.out)
        plan(args)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program quietly
    with one_error_of_all(out_of_memory="take a shorter --seq_len, or measure without this machine"):
        main()
