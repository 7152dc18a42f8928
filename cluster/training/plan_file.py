"""A plan that cluster/plan.py wrote: its choices become flags, and its order of machines becomes the order of ranks.

    ranks as torchrun starts them   0     1     2           pipelines of the plan: `machines` 2, 0
    ranks of the training           1     -     0           machine 1 is idle: training is faster without it
"""

import atexit
import datetime
import json
import sys
from collections.abc import Callable

from planning.machines import Setting, model_facts
from planning.report import make_plan
from planning.schedules import SCHEDULES
from training.compression import WIRE_DTYPES
from training.machine_facts import far_from_home, host_names, this_host
from training.speeds import CLUSTER_JSON, places_of
from checkpoints.survive import is_elastic
from utils import UserError

FLAGS = ("pipelines", "num_microbatches", "gradient_accumulation", "batch_size", "tp_size", "pp_engine", "wire_dtype",
         "gradient_wire_dtype", "recompute")  # what a plan decides


def read_plan(path: str) -> dict:
    """The plan in a file, or {"error": why not}. Two keys are added: `machines`, the ranks in the plan's order, and
    `facts`, what has to be the same in the run.
    """
    try:
        with open(path) as file:
            plan = json.load(file)
        pipelines = plan["pipelines"]
        if plan["schedule"] not in SCHEDULES:
            raise ValueError(f"schedule {plan['schedule']!r} is none of {', '.join(SCHEDULES)}")
        numbers = [plan["micro_batch_size"], plan["seq_len"], *(p["num_microbatches"] for p in pipelines),
                   *(count for p in pipelines for count in p["layers"])]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"it has sizes, layers or micro-batches that are no positive numbers: {numbers}")
        if not {plan.get("wire_dtype"), plan.get("gradient_wire_dtype")} <= {None, *WIRE_DTYPES}:
            raise ValueError(f"its wire dtypes are none of {', '.join(WIRE_DTYPES)}")
        completed(plan)
        fits = pipelines and all(isinstance(host, str) for host in plan["hosts"])
        fits = fits and all(len(pipeline["layers"]) == len(pipeline["machines"]) for pipeline in pipelines)
        if not fits or sorted(plan["machines"]) != sorted({*plan["machines"]} & {*range(len(plan["hosts"]))}):
            raise ValueError(f"machines {plan['machines']} of {len(plan['hosts'])} hosts, each once, with its layers")
        return plan
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {"error": f"--plan {path!r} can't be read ({type(error).__name__}: {error}): use cluster/plan.py"}


def completed(plan: dict) -> dict:
    """The plan with the two keys that read_plan adds."""
    plan["facts"] = {**plan["model"], "dtype": plan["dtype"], "seq_len": plan["seq_len"]}
    plan["machines"] = [rank for pipeline in plan["pipelines"] for rank in pipeline["machines"]]
    return plan


def add_plan_flag(parser) -> None:
    parser.add_argument("--plan", metavar="PLAN.JSON", help="pipelines and schedule that cluster/plan.py chose")


def make_arrangement(parser, args, plan: dict) -> Callable | None:
    """What init_process_group takes as `arrange`: it fills `plan` with that of --plan. None without --plan."""
    def arrange(store, rank: int, world_size: int) -> tuple[int, int]:
        parser.set_defaults(**dict.fromkeys(FLAGS))  # what the command line does not give is None below
        if given := [name for name in FLAGS if getattr(parser.parse_args(), name, None) is not None]:
            raise UserError(f"--plan says what runs where: leave out --{', --'.join(given)}")
        found, *place = take_places(args.plan, store, rank, world_size, getattr(args, "cluster_json", None))
        plan.update(found)
        return tuple(place)

    return arrange if args.plan else None


def take_places(path: str, store, rank: int, world_size: int, cluster_json: str | None = None) -> tuple[dict, int, int]:
    """The plan, and this process's rank in its order of machines and how many these are.

    The rank that can read the file and is least far from home sends it to all through the `store`. In an
    elastic run on other hosts than the plan's, that rank plans anew for those that are there. Processes that the plan
    leaves idle wait here until the training has ended, and exit. Raises UserError for a plan that can't be read, or
    that is for processes on other hosts.
    """
    own = read_plan(path)
    store.set(f"has plan/{rank}", json.dumps({"host": this_host(), "error": own.get("error"),
                                             "far": far_from_home()}))
    others = [json.loads(store.get(f"has plan/{other}")) for other in range(world_size)]
    hosts = host_names([tuple(other["host"]) for other in others], own.get("hosts", ()))
    reader = min(range(world_size), key=lambda k: (bool(others[k]["error"]), others[k]["far"]))
    if rank == reader:
        if "error" not in own and is_elastic() and sorted(hosts) == sorted(own["hosts"]):
            own = in_order(own, hosts)  # an elastic run has ranks in an order of its own
        elif "error" not in own and hosts != own["hosts"]:
            own = plan_for(hosts, own, cluster_json or CLUSTER_JSON) if is_elastic() else {
                "error": f"the plan is for processes on {', '.join(own['hosts'])}, but they run on {', '.join(hosts)}: "
                         "start them in the order of plan.py --measure, or measure again"}
        store.set("plan", json.dumps(own))
    if "error" in (plan := json.loads(store.get("plan"))):
        raise UserError(plan["error"])
    order = plan["machines"]
    if rank not in order:
        try:
            store.wait(["ended"], datetime.timedelta(days=365))
        except RuntimeError:  # the store may end with rank 0's process
            sys.exit(1 if is_elastic() else 0)
        sys.exit(0)
    atexit.register(store.set, "ended", "")
    return plan, order.index(rank), len(order)


def in_order(plan: dict, hosts: list[str]) -> dict:
    """The plan for the same hosts in another order."""
    places = places_of(plan["hosts"], hosts)
    for pipeline in plan["pipelines"]:
        pipeline["machines"] = [places[machine] for machine in pipeline["machines"]]
    return completed({**plan, "hosts": hosts})


def plan_for(hosts: list[str], plan: dict, cluster_json: str) -> dict:
    """As read_plan: a plan with the same global batch for `hosts`, of which those that were not measured are idle."""
    try:
        with open(cluster_json, encoding="utf-8") as file:
            data = json.load(file)
        free, places, ranks = list(enumerate(data["hosts"])), [], []
        for rank, host in enumerate(hosts):
            if place := next((place for place in free if place[1] == host), None):
                free.remove(place)
                places.append(place[0])
                ranks.append(rank)
        data["hosts"] = [data["hosts"][i] for i in places]
        data["machines"] = [data["machines"][i] for i in places]
        data["links"] = [[data["links"][i][j] for j in places] for i in places]
        setting = Setting(plan["schedule"], plan.get("wire_dtype"), plan.get("gradient_wire_dtype"),
                          plan.get("recompute", False))
        made = make_plan(data, plan["global_batch"], setting, [plan["micro_batch_size"]])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        return {"error": f"no plan for {', '.join(hosts)}: {cluster_json}: {error}"}
    for pipeline in made["pipelines"]:
        pipeline["machines"] = [ranks[k] for k in pipeline["machines"]]
    made["hosts"] = hosts
    return completed(made)


def follow_plan(args, plan: dict, config, dtype: str) -> None:
    """Writes the plan into the flags. Raises UserError where it is for another model, --dtype or --seq_len."""
    here = {**vars(config), **model_facts(config), "dtype": dtype, "seq_len": args.seq_len}
    facts = plan["facts"].items()
    if unlike := [f"{name} {value} (here {here.get(name)})" for name, value in facts if here.get(name) != value]:
        raise UserError(f"the plan is for {', '.join(unlike)}: make a plan for this run with cluster/plan.py")
    args.micro_batch_size, args.pp_engine = plan["micro_batch_size"], plan["schedule"]
    args.pipelines = [pipeline["layers"] for pipeline in plan["pipelines"]]
    args.num_microbatches = [pipeline["num_microbatches"] for pipeline in plan["pipelines"]]
    args.wire_dtype, args.gradient_wire_dtype = plan.get("wire_dtype"), plan.get("gradient_wire_dtype")
    args.recompute = plan.get("recompute", False)
