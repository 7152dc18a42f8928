"""A fault: a mistake that somebody's trainer had, as edits of code that is right, and what each check says of it.

    fault.program()              # the step with the fault: run() of lab trains it, diff() shows it
    fault.program(healthy=True)  # without it

The faults stand in faults_*.py, by what they are about, and all of them in faults.py; checks.py has the checks.
"""

from typing import NamedTuple

from lab.launch import ROOT
from lab.program import Edit, Program

# On all replicas: samples of 128 tokens in micro-batches of 4, or two prompts with 4 answers of 8 tokens; ten steps
SAMPLES, TOKENS = 8, 40960
AXIS_OF = {  # of a trainer of same_numbers: what its ranks divide
    "tp": "tp", "sp": "tp", "cp": "cp", "pp": "pp", "ep": "ep", "sharded": "zero", "muon": "zero"}


def after(file: str, old: str, text: str) -> tuple[str, str, str]:
    """The edit that puts `text` behind `old`."""
    return file, old, old + text


def before(file: str, old: str, text: str) -> tuple[str, str, str]:
    return file, old, text + old


class Fault(NamedTuple):
    name: str
    where: str  # a step with its flags, "4 --tp_size 2"; one of same_numbers, "trainer tp"; "library torch 2.13.0"
    sentence: str  # what is wrong, and what it does
    reported: tuple[str, ...]  # owner/name#number of issues and pull requests on GitHub, or arXiv:number
    edits: tuple[tuple[str, str, str], ...]  # file, old, new
    seen: dict[str, str | tuple[str, str]]  # what checks that find it say, as regular expressions: see checks.py
    besides: tuple[tuple[str, str, str], ...] = ()  # what the run without the fault changes, too

    @property
    def step(self) -> str:
        """The number of its step, or the kind of its trainer."""
        return self.where.split()[self.is_trainer]

    @property
    def is_trainer(self) -> bool:
        return self.where.startswith("trainer ")

    @property
    def is_step(self) -> bool:
        return self.where[0].isdigit()

    @property
    def flags(self) -> list[str]:
        """Of the step's train.py: by default 32 samples in each of ten steps, whatever the topology."""
        words = self.where.split()[1:] if self.is_step else []
        replicas = int(words[words.index("--dp_size") + 1]) if "--dp_size" in words else 1
        tokens = TOKENS // 8 if "--generators" in words else TOKENS
        default = {"--gradient_accumulation_steps": SAMPLES // replicas, "--max_tokens": tokens}
        return [*words, *(str(word) for pair in default.items() if pair[0] not in words for word in pair)]

    @property
    def axis(self) -> str:
        """What ranks divide where it is: "dp", "zero", "tp", "pp", "cp", "ep" or "generators"."""
        axes = [axis for axis in ("generators", "ep", "cp", "zero", "pp", "tp") if f"--{axis}" in self.where]
        return AXIS_OF.get(self.step, "dp") if self.is_trainer else (axes or ["dp"])[0]

    def program(self, *further: str, healthy: bool = False) -> Program:
        """The step, or the trainers of same_numbers, with the fault or without it, and with further flags."""
        edits = [Edit(*each) for each in self.besides + self.edits * (not healthy)]
        return Program("", (), edits, folders=(ROOT / "same_numbers",)) if self.is_trainer else Program(
            self.step, (*self.flags, *further), edits)
