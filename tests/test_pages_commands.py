"""Every command of the READMEs, pasted as it stands: it ends well, and what the README quotes is what it prints.

Commands run in a copy of the repository, in the order of the page. Runs of a step that are longer than 5 steps are cut
short by --max_tokens. Of lines "step ..." the loss and the gradient norm are compared, of other lines the words. The
commands of the tours run as they stand, and print the text that their scenes say to look for.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from launch import ROOT, environment
from tours import Scene, find_tours, read_tour

READMES = [path.relative_to(ROOT) for path in [
    ROOT / "README.md", *sorted(ROOT.glob("step*/README.md")), *sorted(ROOT.glob("beyond/**/README.md")),
    *sorted(ROOT.glob("cluster/*.md")), *sorted(ROOT.glob("docs/*.md")), ROOT / "exercises" / "README.md",
    ROOT / "tools" / "README.md", ROOT / "CONTRIBUTING.md"]
    if path.name not in ("FINE_TUNING.md", "RASPBERRY_PI.md", "TOUR.md")]  # the first two change the machine
TOURS = find_tours(ROOT)
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```\n(?:\s*(?:<details>(?:(?!</summary>|```).)*</summary>\s*)?^\1```\n(.*?)"
                   r"^\1```)?", re.S | re.M)
NEEDS = {  # what a command asks for that a test has not -> how it shows
    "several machines": r"FIRST_MACHINE|hosts\.txt|sbatch|torchrun \.\.\.|testbed",
    "the Hugging Face Hub": r"TinyLlama/|Qwen/",
    "a virtual environment of its own": r"pip install",
    "another launcher": r"\b(mpirun|torchx|ray|kubectl|docker|sky) |on_ray",
    "a second terminal": r"py-spy|break_it\.py (hang|deadlock)\n",
    "an editor": r"\bMY_|NAME\b|change\.diff",
}
SHORTER = {  # program -> flags that cut a run short, and what tells that it is short enough already
    r"step\d\w*/train\.py": ("--max_tokens 20480", r"--max_tokens (\d{1,4}|[1-3]\d{4})\b|--steps"),
    r"/run_(causal_lm|gpt2|llama|qwen|bert|vit)\.py": ("--steps 3", r"--steps"),
    r"tools/(sanity_check|maintain/\w+)\.py": ("--help", "--help|--list|--plot"),
    r"--max_steps 5000": ("--max_steps 20", r"--max_steps \d\d\b"),
    r"^pytest|&& pytest": ("--collect-only -q", "--collect-only"),
}
# These end with an error.
FAILS = re.compile(r"try\.py check|break_it\.py (hang|sizes|deadlock|order|\w+ --find)|--timeout \d")
STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+) \| grad norm ([\d.]+)")
TOLERANCE = 2e-3  # relative, of losses and norms of float32 runs


def shortened(command: str) -> str:
    for program, (flags, short) in SHORTER.items():
        lines = re.split(r"(?<!\\)\n", command)  # a line that ends with a backslash goes on
        for i, line in enumerate(lines):
            words = line.partition("  #")[0]
            if re.search(program, words) and not re.search(short, words):
                words, bar, rest = words.partition(" | ")
                lines[i] = f"{words} {flags}{bar}{rest}"
        command = "\n".join(lines)
    return command


def words_of(line: str) -> str:
    """The line without its numbers, paths and spaces."""
    line = re.sub(r"\S*/\S*", "/", line)
    line = re.sub(r"(?<![A-Za-z_])-?\d[\d.,]*(e[+-]?\d+)?[KMGBT%x]*", "#", line)
    return re.sub(r"[\s#'-]+", " ", line).strip()


def unlike(quoted: str, printed: str) -> list[str]:
    """The lines that the README quotes and that were not printed so. "..." stands for any lines."""
    lines = [line.strip() for line in printed.splitlines()]
    found, words = STEP.findall(printed), words_of(" ".join(lines))  # two ranks may have printed into one line
    wrong = ["step ...\n    but no such line"] if STEP.search(quoted) and not found else []
    for line in quoted.splitlines():
        if step := STEP.match(line.strip()):
            same = [row for row in found if row[0] == step[1]]
            near = [row for row in same if all(abs(float(a) - float(b)) <= TOLERANCE * float(b) + 1e-3
                                               for a, b in zip(row[1:], step.groups()[1:]))]
            if same and not near:
                wrong.append(f"{line}\n    but printed {same}")
        elif not line.rstrip().endswith("...") and "..." not in line and words_of(line) not in words:
            wrong.append(line)
    return wrong


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> pathlib.Path:
    """The repository's files, without what a run has left."""
    target = tmp_path_factory.mktemp("copy") / "repository"
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    subprocess.run("git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm all", shell=True,
                   cwd=target, check=True)
    return target


def run(command: str, folder: pathlib.Path) -> tuple[int | None, str]:
    """The exit code (None: it took too long) and what was printed. The first line that fails ends it."""
    command = re.sub(r"(?m)^(diff .*)$", r"\1 || [ $? = 1 ]", command).replace("/tmp/", f"{folder.parent}/")
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(["bash", "-e", "-o", "pipefail", "-c", command], cwd=folder, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True, env=environment(PATH=path, OMP_NUM_THREADS="1"))
    try:
        printed, _ = process.communicate(timeout=400)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def blocks(text: str) -> list[tuple[str, str]]:
    """The commands of a page, each with the output that it quotes."""
    found = [(textwrap.dedent(command), textwrap.dedent(quoted)) for _, command, quoted in BLOCK.findall(text)]
    assert len(found) == text.count("```bash"), "a block that is not closed, or two that were taken for one"
    return found


def needs_more(command: str) -> bool:
    """Whether it asks for something that a test has not."""
    return any(re.search(need, command) for need in NEEDS.values())


def runnable(text: str) -> list[tuple[str, str]]:
    return [block for block in blocks(text) if not needs_more(block[0])]


def fault_of(scene: Scene, code: int | None, printed: str) -> str:
    """What is wrong with a scene whose command ended with `code`, or "". An error may be what it shows."""
    if scene.expected not in printed:
        return f"{scene.title}: `{scene.expected}` is not in what this prints:\n$ {scene.command}\n{printed[-2000:]}"
    found = [line.lower() for line in printed.splitlines() if scene.expected and scene.expected in line]
    may_fail = any("error" in line for line in found) or FAILS.search(scene.command)
    return f"{scene.title}: exit code {code}\n$ {scene.command}\n{printed[-2000:]}" if code and not may_fail else ""


@pytest.mark.slow
@pytest.mark.commands
@pytest.mark.parametrize("readme", [path for path in READMES if runnable((ROOT / path).read_text("utf-8"))], ids=str)
def test_commands(readme, copy):
    wrong, here = [], runnable((ROOT / readme).read_text(encoding="utf-8"))
    for command, quoted in here:
        code, printed = run(shortened(command), copy)
        may_fail = "error" in quoted.lower() or FAILS.search(command)
        if code != 0 and not (may_fail and code):
            wrong.append(f"$ {command}exit code {code}\n{printed[-2000:]}")
        elif lines := unlike(quoted, printed):
            wrong.append(f"$ {command}" + "\n".join(f"  quoted, but not printed: {line}" for line in lines))
    assert not wrong, f"{len(wrong)} of {len(here)} commands of {readme}:\n\n" + "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.commands
@pytest.mark.parametrize("tour", TOURS)
def test_commands_of_a_tour(tour, copy):
    here = [scene for scene in read_tour(TOURS[tour]).scenes if scene.command and not needs_more(scene.command)]
    wrong = list(filter(None, (fault_of(scene, *run(scene.command, copy)) for scene in here)))
    assert not wrong, f"{len(wrong)} of {len(here)} commands of the tour {tour}:\n\n" + "\n\n".join(wrong)
