"""A program: a step's train.py with its flags, and maybe with edits of its source, which leave its files as they are.

    program = Program("8", ["--pp_size", 4], edits=[Edit("train.py", old, new)])
    ranks = [program.load() for _ in range(2)]  # its modules, for ranks of this process
    ranks[1].pipeline_parallel.PipelineParallel  # not that of ranks[0]
    program.copy(folder)  # the path of a train.py, for torchrun
    print(program.diff())

The modules of a step share one global grid, so each rank of this process needs modules of its own.
"""

import argparse
import builtins
import copy
import difflib
import functools
import itertools
import linecache
import pathlib
import shutil
import sys
import types
from collections.abc import Sequence
from typing import NamedTuple

from lab.launch import STEPS

AXES = {"dp_size": 1, "pp_size": 1, "tp_size": 1, "cp_size": 1, "ep_size": 1, "zero": 0, "generators": 0,
        "virtual_stages": 1}


class Edit(NamedTuple):
    """Replaces the text `old`, which `file` contains exactly once, by `new`."""

    file: str
    old: str
    new: str


@functools.cache
def compile_file(path: pathlib.Path) -> types.CodeType:
    return compile(path.read_bytes(), path, "exec")


class Program:
    """The modules in `folders`, by default those of step `step`, with the flags of its train.py. A path instead of a
    step is that of another script, which has a main(), too.

    `edits` change the text of its files, and the code in `changed` takes the place of a whole module's. Raises
    ValueError for a step that there is not, and where a file does not contain the text of an edit exactly once.
    """

    def __init__(self, step: int | str | pathlib.Path, flags: Sequence = (), edits: Sequence[Edit] = (),
                 changed: dict[str, types.CodeType] | None = None, folders: tuple[pathlib.Path, ...] = ()):
        self.main = "train.py"
        if isinstance(step, pathlib.Path):
            self.main, folders, step = step.name, (step.parent,), ""
        if not folders and str(step) not in STEPS:
            raise ValueError(f"there is no step {step}: choose one of {', '.join(sorted(STEPS, key=int))}")
        self.step, self.flags, self.edits = str(step), [*map(str, flags)], [*edits]
        self.folders, self.texts = folders or (STEPS[str(step)],), {}
        for edit in edits:
            self.texts[edit.file] = self.edited(edit)
        self.changed = {pathlib.Path(file).stem: self.compiled(file) for file in self.texts} | (changed or {})

    def edited(self, edit: Edit) -> str:
        """The text of the edit's file, after the edits before it and this one."""
        path = self.folders[0] / edit.file
        if path.name != edit.file or path.suffix != ".py" or not path.is_file():  # no other way to write a path
            raise ValueError(f"there is no {edit.file} in {self.folders[0].name}: name a .py file of that folder")
        text = self.texts.get(edit.file) or path.read_text(encoding="utf-8")
        if (count := text.count(edit.old)) != 1:
            raise ValueError(f"{path.parent.name}/{edit.file} contains this text {count} times, not once: {edit.old!r}")
        return text.replace(edit.old, edit.new)

    def compiled(self, file: str) -> types.CodeType:
        text = self.texts[file]
        names = (f"{self.folders[0] / file}, changed{f' ({i})' * (i > 1)}" for i in itertools.count(1))
        name = next(name for name in names if "".join(linecache.getlines(name)) in ("", text))  # one for each text
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # for the lines of messages
        return compile(text, name, "exec")

    def load(self) -> "StepModules":
        return StepModules(self)

    def with_flags(self, flags: Sequence) -> "Program":
        """The same program with these flags."""
        other = copy.copy(self)
        other.flags = [*map(str, flags)]
        return other

    @property
    def sizes(self) -> argparse.Namespace:
        """What the flags say of the ranks."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for name, default in AXES.items():
            parser.add_argument(f"--{name}", type=int, default=default)
        for name, default in {"gradient_accumulation_steps": 8, "micro_batch_size": 1, "seq_len": 16, "group_size": 1,
                              "num_experts": 0}.items():  # of SMALL, in lab/ranks.py
            parser.add_argument(f"--{name}", type=int, default=default)
        parser.add_argument("--pp_engine", default="1f1b")
        parser.add_argument("--pipelines", default="")
        parser.add_argument("--sequence_parallel", action="store_true")
        return parser.parse_known_args(self.flags)[0]

    @property
    def size(self) -> int:
        """The number of its ranks."""
        found = self.sizes
        stages = found.pipelines and 1 + found.pipelines.replace(";", ",").count(",")  # of step 9's unlike pipelines
        return (stages or found.dp_size * found.pp_size * found.cp_size) * found.tp_size + found.generators

    def one_process(self) -> "Program":
        """The same in one process, which does the micro-batches of all replicas."""
        left_out = {*(f"--{axis}" for axis in AXES), "--zero_shares", "--gradient_accumulation_steps", "--pp_engine",
                    "--generator_tp_size"}
        kept = [word for before, word in zip(["", *self.flags], self.flags)
                if not {before, word} & left_out and word != "--sequence_parallel"]
        kept += ["--generators", 0] * any(flag.startswith("--generators") for flag in self.flags)  # it plays both parts
        return self.with_flags([*kept, "--dp_size", 1, "--pp_size", 1, "--tp_size", 1, "--gradient_accumulation_steps",
                                self.sizes.dp_size * self.sizes.gradient_accumulation_steps])

    def path(self, name: str) -> pathlib.Path | None:
        """The file of the module `name`, None where there is no such module."""
        file = self.main if name == "train" else f"{name}.py"
        return next((path for folder in self.folders if (path := folder / file).is_file()), None)

    def code(self, name: str) -> types.CodeType:
        return self.changed.get(name) or compile_file(self.path(name))

    def script(self, folder: pathlib.Path) -> pathlib.Path:
        """The path of its train.py: where there are edits, of a copy in `folder`."""
        return self.copy(folder) if self.texts else self.folders[0] / self.main

    def copy(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes a copy of the step with the edits into `folder`, and returns the path of its train.py."""
        target = folder / self.folders[0].name
        shutil.copytree(self.folders[0], target, ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in self.texts.items():
            (target / file).write_text(text, encoding="utf-8")
        return target / self.main

    def diff(self) -> str:
        """What the edits change."""
        lines = []
        for file, text in sorted(self.texts.items()):
            name = f"{self.folders[0].name}/{file}"
            old = (self.folders[0] / file).read_text(encoding="utf-8")
            lines += difflib.unified_diff(old.splitlines(keepends=True), text.splitlines(keepends=True), name,
                                          f"{name}, in a copy", n=1)
        return "".join(lines)


class StepModules:
    """One rank's modules of a step: `modules.model` imports model.py, and what that imports, at its first use."""

    def __init__(self, program: Program):
        self._program, self._loaded = program, {}
        self._builtins = {**vars(builtins), "__import__": self._import, "print": self._print}

    def __getattr__(self, name: str) -> types.ModuleType:
        if name.startswith("_") or self._program.path(name) is None:
            raise AttributeError(f"there is no {name}.py in {self._program.folders[0].name}")
        if name not in self._loaded:
            module = self._loaded[name] = types.ModuleType(name)
            module.__file__, module.__builtins__ = str(self._program.path(name)), self._builtins
            exec(self._program.code(name), vars(module))
            if name == "process_group_manager":  # ranks of this process share one count of groups: there is no other
                module.require_equal_counts = lambda: None
        return self._loaded[name]

    def _print(self, *args, **kwargs) -> None:
        """What a step itself prints is dropped, such as the grid of its ranks."""
        if pathlib.Path(sys._getframe(1).f_code.co_filename).parent not in self._program.folders:
            print(*args, **kwargs)

    def _import(self, name: str, *args, **kwargs):
        return builtins.__import__(name, *args, **kwargs) if self._program.path(name) is None else getattr(self, name)
