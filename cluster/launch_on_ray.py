"""Starts a script on a Ray cluster, one process a worker, with the variables that torchrun would set.

    python cluster/launch_on_ray.py --num_workers 4 -- step8_pipeline_parallel_1f1b/train.py --pp_size 4
    python cluster/launch_on_ray.py --num_workers 16 --tp_size 2 --max_restarts 3 -- cluster/train_distributed.py \\
        --tp_size 2 --save_every 50 --resume auto --checkpoint_dir /shared/checkpoints

Each worker is an actor of Ray with a child process, which may end as it likes: Ray would take that for a crash. The
first rank that is lost ends all of them. The repository has to be at the same path on all nodes.
"""

import argparse
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time

try:
    import ray
except ImportError:
    sys.exit("error: launch_on_ray.py needs Ray: pip install -c constraints.txt -e '.[engines]'")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SETTLE, START = 3.0, 60.0  # seconds: further ranks may say why they failed; workers have to start
LOST, USER_ERROR = 256, 2  # exit codes: of a rank whose node or actor is gone; of a script that was started wrongly


@ray.remote
class Worker:
    def place(self) -> tuple[str, str, int, list]:
        """Its node, the node's address, a port that is free there, and the GPUs that Ray has given to this rank."""
        with socket.socket() as free:
            free.bind(("", 0))
            node = ray.get_runtime_context().get_node_id()
            return node, ray.util.get_node_ip_address(), free.getsockname()[1], ray.get_gpu_ids()

    def run(self, words: list[str], variables: dict):
        """Yields each line that the script prints, in the end its exit code. The script is killed with this actor."""
        environment = {name: str(value) for name, value in (os.environ | variables).items()}
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))  # 1: PR_SET_PDEATHSIG
        for line in process.stdout:  # not `yield from`: Ray would send values into the file
            yield line
        yield process.wait()


def room_for(need: dict[str, float]) -> int:
    """How many bundles with these resources the nodes that are alive can hold."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(min(int(node.get(name, 0) / count + 1e-9) for name, count in need.items()) for node in nodes)


def start(group, args, variables: dict) -> list[tuple]:
    """(actor, its node's address, its output) of each rank, node by node. A bundle is one tensor-parallel group."""
    need = {"num_cpus": args.cpus_per_worker, "num_gpus": int("GPU" in group.bundle_specs[0])}
    workers = [Worker.options(placement_group=group, placement_group_bundle_index=i, **need).remote()
               for i in range(group.bundle_count) for _ in range(args.tp_size)]
    places = ray.get([worker.place.remote() for worker in workers], timeout=START)
    ranks = sorted(zip(places, workers), key=lambda rank: rank[0][0])  # which keeps the ranks of a group together
    nodes, started = [place[0] for place, _ in ranks], []
    for rank, ((node, address, _, _), worker) in enumerate(ranks):
        mine = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": rank - nodes.index(node), "PYTHONUNBUFFERED": 1,
                "LOCAL_WORLD_SIZE": nodes.count(node), "MASTER_ADDR": ranks[0][0][1], "MASTER_PORT": ranks[0][0][2]}
        if gpus := [str(gpu) for place, _ in ranks if place[0] == node for gpu in place[3]]:
            mine["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        run = worker.run.options(num_returns="streaming")
        started.append((worker, address, run.remote(args.script, mine | variables)))
    return started


def follow(started: list[tuple]) -> tuple[int, str]:
    """Prints the lines of all ranks until they have ended. Returns the exit code, and where the cause of it was."""
    running, failures, deadline = {stream: rank for rank, (*_, stream) in enumerate(started)}, [], None
    while running and not (deadline and time.monotonic() > deadline):
        for stream in ray.wait(list(running), timeout=0.5)[0]:
            try:
                said = ray.get(next(stream))
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, StopIteration):
                said = LOST
            if isinstance(said, str):
                print(f"rank {running[stream]} | {said.rstrip()}", flush=True)
            elif (rank := running.pop(stream)) is not None and said:
                failures.append((said, f"rank {rank} on {started[rank][1]}"))
                wait = SETTLE if 0 < said < LOST else 0  # other ranks may be the cause, or say more
                deadline = min(deadline or math.inf, time.monotonic() + wait)
    causes = [each for each in failures if each[0] == LOST] or [each for each in failures if each[0] < 0] or failures
    return (causes or [(0, "")])[0]  # a rank that misses another one fails as well, with exit code 1


def reserve(args, is_first: bool):
    """A placement group for all workers; when started anew, for as many as the nodes that are left have room for."""
    need = {"CPU": args.cpus_per_worker * args.tp_size}
    if "GPU" in ray.cluster_resources():
        need["GPU"] = args.tp_size
    wanted, deadline = args.num_workers // args.tp_size, time.monotonic() + START
    while time.monotonic() < deadline:  # that a node is gone is known after some seconds
        num_groups = min(wanted, room_for(need))
        if is_first and num_groups < wanted:
            break
        group = num_groups and ray.util.placement_group([need] * num_groups, strategy="PACK")
        if group and group.wait(5):
            return group
        group and ray.util.remove_placement_group(group)
    sys.exit(f"error: the nodes have room for {num_groups * args.tp_size} of --num_workers {args.num_workers}, where each "
             f"{args.tp_size} need {need} of one node: add nodes, end other jobs, or lower a flag")


def attempt(args, count: int) -> tuple[int, str]:
    """Runs the script once. Returns what follow() does."""
    group = reserve(args, count == 0)
    try:
        return follow(start(group, args, {
            "TORCHELASTIC_RUN_ID": ray.get_runtime_context().get_job_id(), "TORCHELASTIC_RESTART_COUNT": count,
            "TORCHELASTIC_MAX_RESTARTS": args.max_restarts}))
    except ray.exceptions.RayError as error:
        return LOST, f"a worker that was to start ({type(error).__name__})"
    finally:
        ray.util.remove_placement_group(group)  # which ends its actors, and with them the scripts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--num_workers", type=int, required=True, help="processes, with a GPU each where nodes have one")
    parser.add_argument("--tp_size", type=int, default=1, help="so many neighbours stay on one node")
    parser.add_argument("--cpus_per_worker", type=float, default=1.0, help="that Ray reserves for each")
    parser.add_argument("--max_restarts", type=int, default=0, help="start anew on what is left, so often at most")
    parser.add_argument("script", nargs="+", help="from the root of the repository, with its flags, behind --")
    args = parser.parse_args()
    if args.tp_size < 1 or args.cpus_per_worker <= 0 or args.num_workers < 1 or args.num_workers % args.tp_size:
        sys.exit(f"error: --num_workers {args.num_workers} has to be a multiple of --tp_size {args.tp_size}, both above 0")
    ray.init(log_to_driver=False, logging_level="warning")
    for count in range(args.max_restarts + 1):
        code, where = attempt(args, count)
        if code in (0, USER_ERROR):
            break
        how = f"has ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        then = f"restart {count + 1} of {args.max_restarts}" if count < args.max_restarts else "no restart is left"
        print(f"launch_on_ray: {where} {'is lost' if code == LOST else how}: all ranks have been ended, {then}",
              file=sys.stderr, flush=True)
    sys.exit(code if code in (0, USER_ERROR) else 1)


if __name__ == "__main__":
    main()
