"""Starts a script on a Ray cluster, one process a worker, with the variables that torchrun would set.

    python cluster/engines/launch_on_ray.py --num_workers 4 -- step8_pipeline_parallel_1f1b/train.py --pp_size 4
    python cluster/engines/launch_on_ray.py --num_workers 16 --tp_size 2 --max_restarts 3 -- \\
        cluster/train_distributed.py --tp_size 2 --save_every 50 --resume auto --checkpoint_dir /shared/checkpoints

Each worker is an actor with a child process, which may end as it likes; an actor may not. The first rank that is lost
ends all of them. The repository has to be at the same path on all nodes.
"""

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

try:
    import ray
except ImportError:
    ray = None

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SETTLE = 3.0  # seconds in which further ranks may say why they failed
LOST, USER_ERROR = 256, 2  # exit codes: of a rank whose node or actor is gone; of a script that was started wrongly


class Worker:
    def place(self) -> tuple[str, str, int, list]:
        """Its node, the node's address, a port that is free there, and the GPUs that Ray has given to this rank."""
        with socket.create_server(("", 0)) as free:
            node = ray.get_runtime_context().get_node_id()
            return node, ray.util.get_node_ip_address(), free.getsockname()[1], ray.get_gpu_ids()

    def run(self, words: list[str], variables: dict):
        """Yields each line that the script prints, in the end its exit code. The script is killed with this actor."""
        process = subprocess.Popen(
            [sys.executable, *words], env={name: str(value) for name, value in (os.environ | variables).items()},
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))  # 1: PR_SET_PDEATHSIG
        yield from (line for line in process.stdout)  # a generator: Ray sends values into it
        yield process.wait()


def reserve(num_groups: int, need: dict[str, float], is_first: bool):
    """A placement group; when the script starts anew, for as many groups as the nodes that are left have room for."""
    for _ in range(12):  # times 5 s: that a node is gone is known after some time
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(min(int(node.get(name, 0) / count + 1e-9) for name, count in need.items()) for node in nodes)
        if room == 0 or is_first and room < num_groups:
            break
        group = ray.util.placement_group([need] * min(room, num_groups), strategy="PACK")
        if group.wait(5):
            return group
        ray.util.remove_placement_group(group)
    sys.exit(f"error: room for {room} of {num_groups} groups of --tp_size neighbours, with {need} of one node each, or "
             "other jobs have it: add nodes, end these, or lower --num_workers or --cpus_per_worker")


def start(group, tp_size: int, words: list[str], variables: dict) -> list[tuple]:
    """(actor, its node's address, its output) of each rank, node by node. A bundle is one tensor-parallel group."""
    need = {f"num_{name.lower()}s": count / tp_size for name, count in group.bundle_specs[0].items()}
    workers = [ray.remote(Worker).options(placement_group=group, placement_group_bundle_index=i, **need).remote()
               for i in range(group.bundle_count) for _ in range(tp_size)]
    places = ray.get([worker.place.remote() for worker in workers])
    ranks = sorted(zip(places, workers), key=lambda rank: rank[0][0])  # which keeps the ranks of a group together
    nodes, started = [place[0] for place, _ in ranks], []
    for rank, ((node, address, _, _), worker) in enumerate(ranks):
        mine = {"RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_RANK": rank - nodes.index(node), "PYTHONUNBUFFERED": 1,
                "LOCAL_WORLD_SIZE": nodes.count(node), "MASTER_ADDR": ranks[0][0][1], "MASTER_PORT": ranks[0][0][2]}
        if gpus := [str(gpu) for place, _ in ranks if place[0] == node for gpu in place[3]]:
            mine["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        lines = worker.run.options(num_returns="streaming").remote(words, mine | variables)
        started.append((worker, address, lines))  # an actor lives as long as somebody knows it
    return started


def follow(started: list[tuple]) -> tuple[int, str]:
    """Prints the lines of all ranks until they have ended. Returns the exit code, and what was its cause."""
    running, failures, deadline = {lines: rank for rank, (*_, lines) in enumerate(started)}, [], float("inf")
    while running and time.monotonic() < deadline:
        for lines in ray.wait(list(running), timeout=0.5)[0]:
            try:
                said = ray.get(next(lines))
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, StopIteration):
                said = LOST
            if isinstance(said, str):
                print(f"rank {running[lines]} | {said.rstrip()}", flush=True)
            elif (rank := running.pop(lines)) is not None and said:
                how = "is lost" if said == LOST else f"has ended with exit code {said}"
                how = f"was killed by {signal.Signals(-said).name}" if said < 0 else how
                failures.append((said, f"rank {rank} on {started[rank][1]} {how}"))
                deadline = min(deadline, time.monotonic() + (SETTLE if 0 < said < LOST else 0))
    # A rank that misses another one fails as well, with exit code 1: a loss is the cause, else an error of the user.
    return min(failures, key=lambda failure: (0 < failure[0] < LOST) + (failure[0] == 1), default=(0, ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--num_workers", type=int, required=True, help="with a GPU each where nodes have one")
    parser.add_argument("--tp_size", type=int, default=1, help="so many neighbours stay on one node")
    parser.add_argument("--cpus_per_worker", type=float, default=1.0, help="that Ray reserves for each")
    parser.add_argument("--max_restarts", type=int, default=0, help="start anew on what is left, so often at most")
    parser.add_argument("script", nargs="+", help="from the root of the repository, with its flags, behind --")
    args = parser.parse_args()
    if min(args.num_workers, args.tp_size, args.cpus_per_worker) <= 0 or args.num_workers % args.tp_size:
        sys.exit(f"error: --num_workers {args.num_workers} must be a multiple of --tp_size {args.tp_size}, all above 0")
    if ray is None:
        sys.exit("error: launch_on_ray.py needs Ray: pip install -c constraints.txt -e '.[engines]'")
    ray.init(log_to_driver=False, logging_level="warning")
    need = {"CPU": args.cpus_per_worker * args.tp_size}
    need |= {"GPU": args.tp_size} if "GPU" in ray.cluster_resources() else {}
    for count in range(max(args.max_restarts, 0) + 1):
        group = reserve(args.num_workers // args.tp_size, need, count == 0)
        try:
            code, what = follow(start(group, args.tp_size, args.script, {
                "TORCHELASTIC_RUN_ID": ray.get_runtime_context().get_job_id(),
                "TORCHELASTIC_MAX_RESTARTS": args.max_restarts, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "inf"}))
        except ray.exceptions.RayError as error:
            code, what = LOST, f"a worker did not start ({str(error).splitlines()[0]})"
        ray.util.remove_placement_group(group)  # which ends its actors, and with them the scripts
        if code in (0, USER_ERROR):
            sys.exit(code)
        print(f"launch_on_ray: {what}: all ranks have been ended, {args.max_restarts - count} restarts are left",
              file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
