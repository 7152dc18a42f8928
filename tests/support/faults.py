"""An elastic run on the test bed into which a seed draws faults: what happens, to which host, at which moment.

Each fault waits for its moment in what the run prints, happens, is mended after a drawn time, and then the run has to
make steps again: by itself, or, where it has ended with one clear line, by the same command. What the seed draws is in
`plan`, so the same seed gives the same plan; how far the run has come when a fault happens differs a little.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import resource
import signal
import sys
import time
from typing import NamedTuple

from lab.launch import ROOT
from maintain.bed import NODES, SSH_CONFIG, testbed
from maintain.elastic_bed import kill_all, nothing_runs, pids_of, switch_on
from maintain.launcher import Launch, eventually, write_hosts
from maintain.processes import processes

FLAGS = ["--seq_len", 16, "--dtype", "float64", "--batch_size", 1, "--num_hidden_layers", 4, "--learning_rate", 1e-5,
         "--device", "cpu"]
SAVE_EVERY, EVALUATE_EVERY = 10, 15
PATIENCE = 240  # seconds until the next step is there: hosts may start while other programs run
EVALUATION = ["--validation_split", 0.2, "--eval_every", EVALUATE_EVERY]
LAYOUTS = {  # name -> (flags that decide what is computed where, flags of one process as well)
    "shares": (["--num_microbatches", 6], []),
    "one pipeline": (["--pipelines", "2,1,1|2,2|4", "--num_microbatches", "6"], []),
    "two pipelines": (["--pipelines", "4;2,2|4;4|4", "--num_microbatches", "4,2|3,3|6"], []),
    "evaluation": (["--num_microbatches", 6], EVALUATION),
    "adapters": (["--pipelines", "2,1,1|2,2|4", "--num_microbatches", "6"],
                 ["--lora_rank", 4, "--learning_rate", 1e-3, *EVALUATION]),
}
KINDS = ["rank", "told rank", "agent", "host", "first host", "launcher", "cable", "disk", "logs", "memory"]
MOMENTS = ["training", "saving", "evaluating", "measuring", "remaking"]
FILLED = {"disk": ROOT / "checkpoints", "logs": ROOT / "runs"}  # kind of fault -> the folder whose disk is full


class Fault(NamedTuple):
    """`after`: seconds from its moment. `lasts`: seconds until what is cut, off or full is mended."""

    kind: str
    node: str
    moment: str
    after: float
    lasts: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.node}, while {self.moment} + {self.after:.2f} s, for {self.lasts:.1f} s"


class Plan(NamedTuple):
    layout: str
    is_detached: bool
    faults: list[Fault]


def draw(seed: int, count: int) -> Plan:
    """A run with so many faults. No two runs in a row have the same layout."""
    chance = random.Random(seed)
    layout = [*LAYOUTS][seed % len(LAYOUTS)]
    moments = MOMENTS if LAYOUTS[layout][1] else [each for each in MOMENTS if each != "evaluating"]
    faults = []
    for number in range(count):
        kind = chance.choice(KINDS)
        moment = chance.choice([each for each in moments if number or each != "remaking"])
        node = NODES[0] if kind == "first host" else chance.choice(NODES)
        faults.append(Fault(kind, node, moment, chance.uniform(0, 0.6), chance.uniform(1, 12)))
    return Plan(layout, chance.random() < 0.4, faults)


def kill_processes(node: str, word: str, number: int = signal.SIGKILL) -> None:
    """A signal for the processes of that host which run this script, and for nothing else there."""
    for pid in pids_of(node):
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "python" in words[0] and any(each.endswith(word) for each in words[1:3]):
                os.kill(int(pid), number)


def fill(node: str, folder: pathlib.Path) -> None:
    """Not a byte more goes into that folder of that host; what is there stays."""
    testbed("exec", node, "dd", "if=/dev/zero", f"of={folder / 'filler'}", "bs=4k", check=False)


def take_memory(node: str) -> None:
    """The ranks of that host get 4 MB more from now on, too little for a thread, until they are started anew."""
    for pid in pids_of(node):
        with contextlib.suppress(OSError):
            if b"train_distributed.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0])
                limit = pages * resource.getpagesize() + (4 << 20)
                resource.prlimit(int(pid), resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


class FaultyRun:
    """A run on all three hosts under the name `name`. `log`: what happened, when."""

    def __init__(self, folder: pathlib.Path, name: str, plan: Plan, sources: list):
        self.name, self.plan, self.log, self.begun_at = name, plan, [], time.monotonic()
        self.hosts = write_hosts(folder, *(f"{node} python={sys.executable}" for node in NODES))
        layout, others = LAYOUTS[plan.layout]
        self.words = ["--elastic", "1:3", "--env", "OMP_NUM_THREADS=1", "--", "cluster/train_distributed.py", *FLAGS,
                      *layout, *others, *sources, "--max_steps", 100000, "--save_every", SAVE_EVERY, "--run_name", name,
                      "--log_dir", "runs", "--resume", "auto"]
        for node in NODES:
            for place, size in zip(FILLED.values(), ("100m", "20m")):
                testbed("exec", node, "mount", "-t", "tmpfs", "-o", f"size={size}", "none", place)
        self.begin()

    def say(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self.begun_at:6.1f} s  {text}")

    def launch(self, *words) -> Launch:
        return Launch(self.hosts, *map(str, words), options=f"-F {SSH_CONFIG}")

    def begin(self) -> None:
        """The command that starts the run, and starts it again where it has ended or hosts have no part."""
        if self.plan.is_detached:
            code, text = self.launch("--detach", *self.words).end(90)
            assert code == 0, self.report(text)
        self.run = self.launch(*(["--attach"] if self.plan.is_detached else self.words))
        self.mark = 0

    def steps(self) -> list[int]:
        """The numbers of the steps that were printed since the mark."""
        found = (re.search(r"\| step (\d+)/", line) for line in self.run.lines[self.mark:])
        return [int(match[1]) for match in found if match]

    def has_ended(self) -> bool:
        return self.run.process.poll() is not None

    def report(self, text: str = "") -> str:
        return "\n".join([str(self.plan), *self.log, text or self.run.output()[-6000:]])

    def wait(self, condition, seconds: float, what: str) -> None:
        found = eventually(lambda: condition() or self.has_ended(), seconds)
        assert found, self.report(f"not within {seconds} s: {what}\n{self.run.output()[-6000:]}")

    def await_moment(self, fault: Fault) -> None:
        every = {"saving": SAVE_EVERY, "evaluating": EVALUATE_EVERY}.get(fault.moment)
        if fault.moment == "training":
            self.wait(lambda: len(self.steps()) > 5, PATIENCE, "a step")
        elif every:
            self.wait(lambda: any(step % every in (0, every - 1) for step in self.steps()[5:]), PATIENCE, fault.moment)
        elif fault.moment == "measuring":
            self.wait(lambda: "ranks over" in "".join(self.run.lines[self.mark:]) or len(self.steps()) > 20, PATIENCE,
                      "a start")
        time.sleep(fault.after)

    def strike(self, fault: Fault) -> None:
        {"rank": lambda: kill_processes(fault.node, "train_distributed.py"),
         "told rank": lambda: kill_processes(fault.node, "train_distributed.py", signal.SIGTERM),
         "agent": lambda: kill_processes(fault.node, "host_run.py"),
         "host": lambda: self.switch_off(fault.node), "first host": lambda: self.switch_off(fault.node),
         "launcher": self.kill_launcher, "cable": lambda: testbed("cut", fault.node),
         "disk": lambda: fill(fault.node, FILLED["disk"]), "logs": lambda: fill(fault.node, FILLED["logs"]),
         "memory": lambda: take_memory(fault.node)}[fault.kind]()

    def switch_off(self, node: str) -> None:
        """A fault before this one may have done it."""
        if pids_of(node):
            kill_all(node)

    def kill_launcher(self) -> None:
        """With its ssh processes, as when a laptop is switched off."""
        for pid in processes(self.run.marker):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.run.process.wait()

    def mend(self, fault: Fault) -> None:
        if fault.kind in FILLED:
            testbed("exec", fault.node, "rm", "-f", FILLED[fault.kind] / "filler")
        elif fault.kind != "launcher":
            switch_on(fault.node)

    def suffer(self) -> None:
        """All faults of the plan. One that comes while remaking does not wait for the one before to be mended."""
        faults, open_faults = self.plan.faults, []
        for number, fault in enumerate(faults):
            self.await_moment(fault)
            self.say(str(fault))
            open_faults.append((time.monotonic() + fault.lasts, fault))
            self.strike(fault)
            if number + 1 < len(faults) and faults[number + 1].moment == "remaking":
                self.mark = len(self.run.lines)
                continue
            for at, each in sorted(open_faults, key=lambda each: each[0]):
                time.sleep(max(0, at - time.monotonic()))
                self.mend(each)
            self.go_on([each.kind for _, each in open_faults])
            open_faults = []

    def go_on(self, kinds: list[str]) -> None:
        """Waits for steps after all is mended; starts the command again where the run has ended."""
        self.mark = len(self.run.lines)
        if "launcher" not in kinds and not self.has_ended():
            if self.plan.is_detached:
                code, text = self.launch("--detach", *self.words).end(90)  # hosts without a part get one
                self.say(f"--detach: code {code}")
            self.wait(lambda: len(self.steps()) > 8, 90, "steps after the fault")
        if self.has_ended():
            if "launcher" not in kinds:
                lines = [line for line in self.run.lines if "Traceback" in line or "error: " in line]
                assert lines and not any("Traceback" in line for line in lines), self.report()
                self.say(f"the run has ended: {lines[-1].strip()[:160]}")
            if not self.plan.is_detached or "launcher" not in kinds:
                assert eventually(nothing_runs, 60), self.report("the run is still there")
            self.begin()
            self.wait(lambda: len(self.steps()) > 8, 90, "steps after a new start")
            assert not self.has_ended(), self.report()
        self.say(f"goes on, at step {self.steps()[-1]}")
        self.mark = len(self.run.lines)

    def stop(self) -> None:
        if self.plan.is_detached:
            self.launch("--stop").end(90)
        else:
            os.killpg(self.run.process.pid, signal.SIGINT)
        self.run.end(90)
        assert eventually(nothing_runs, 10), self.report("something is left running")

    def rows(self) -> dict[str, list[dict]]:
        """The metrics on the disk of each host that has any."""
        texts = {node: testbed("exec", node, "cat", FILLED["logs"] / self.name / "metrics.jsonl", check=False).stdout
                 for node in NODES}
        return {node: [json.loads(line) for line in text.splitlines()] for node, text in texts.items() if text}

    def clear(self) -> None:
        """Whatever happened, the hosts are on, joined and empty afterwards."""
        for pid in processes(self.run.marker):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for node in NODES:
            for word in ("host_run.py", "train_distributed.py"):
                kill_processes(node, word)
            switch_on(node)
            for place in FILLED.values():
                testbed("exec", node, "umount", "-l", place, check=False)
            testbed("wipe", node)
