"""Every command of every page, pasted as it stands: it ends well, and what the page quotes is what it prints.

Each page has a fresh clone, in which its blocks run in their order. Runs of a step that are longer than 5 steps are cut
short by --max_tokens. Of lines "step ..." the loss and the gradient norm are compared, of other lines the words. A page
that speaks of several machines is typed on node0 of the test bed, where it is ~/tutorial, or what is about the bed
itself on the machine that has it. LEFT_OUT has the lines that can't run, and why.

    pytest -m commands tests/test_pages_commands.py          all blocks of all pages, but for those on hosts
    pytest -n 0 -m hosts tests/test_pages_commands.py        as root: those
    pytest -n 0 -s -m slow tests/test_pages_commands.py -k counted      how many blocks there are, and which are left out
"""

import collections
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from typing import NamedTuple

import pytest
from bed import DISKS, NODES, SCRIPT, bed, testbed
from launch import ROOT, environment
from test_pages import READMES

NETWORK, GPU, HOUR, CI = "a network", "a GPU", "an hour", "run by .ci/run"
LEFT_OUT = {  # page -> how lines of it begin, what they need, and where else something of them is tested
    "README.md": [("python3 -m venv", CI, "as they stand, the first thing that it does")],
    "CONTRIBUTING.md": [("python3 -m venv", CI, "the README's second command"), ("pip install", CI, "likewise")],
    "cluster/CHECKPOINTS.md": [
        ("sudo ufw", NETWORK, "a firewall is that of the reader's own"),
        ("sbatch cluster", NETWORK, "of nodes with Slurm: test_cluster_slurm.py"),
        ("sbatch --nodes=4 --gpus-per-node=8", GPU, "32 of them")],
    "cluster/FINE_TUNING.md": [
        ("cluster/launch_cluster.sh hosts.txt -- cluster/train_distributed.py --model_name HuggingFaceTB", NETWORK, "the Hub"),
        ("python cluster/generate.py --adapter checkpoints/speeches --chat\n", NETWORK, "what the line above trains"),
        ("sudo sed -i", NETWORK, "names in the reader's own"), ("sudo tee -a", NETWORK, "likewise"),
        ("sudo ufw", NETWORK, "a firewall is that of the reader's own"),
        ("python tools/get_smollm2.py", NETWORK, "a package of 270 MB: test_tool_get_smollm2.py; here a small model stands in"),
        ("pip install", NETWORK, "a package")],
    "cluster/LAUNCH.md": [("apt-get install", NETWORK, "packages")],
    "cluster/RASPBERRY_PI.md": [("for host in pi0", NETWORK, "packages"), ("sudo apt-get", NETWORK, "a package"),
                                ("echo 'PERCENT", NETWORK, "what that package reads")],
    "cluster/RESULTS.md": [("python tools/maintain/measure_hosts.py", HOUR, "test_tool_benchmark.py has parts of it")],
    "cluster/SLOW_LINKS.md": [("python tools/maintain/measure_hosts.py", HOUR, "")],
    "docs/FLAGS.md": [("torchrun --nproc_per_node 8", NETWORK, "the Hub"), ("torchrun --nproc_per_node 3", NETWORK, "the Hub")],
    "docs/LAUNCHERS.md": [
        ("pip install", NETWORK, "packages"), ("torchx run -s slurm", GPU, "16"), ("torchx run -s kubernetes", GPU, "16"),
        ("python runs/on_ray.py --nproc_per_node 8", GPU, "16"), ("docker build", NETWORK, "a registry"),
        ("kubectl", GPU, "16: test_cluster_engines_rendered.py")],
}
KINDS = {NETWORK, GPU, HOUR, CI}
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```\n(?:\s*(?:<details>(?:(?!</summary>|```).)*</summary>\s*)?^\1```\n(.*?)"
                   r"^\1```|\nLook for `([^`]+)`\.)?", re.S | re.M)
HIDDEN = re.compile(r"(?:\$ .*|(?:torchrun|torchx|python3?|pip|mpirun|ray|sbatch|sudo|apt-get|docker|kubectl|cluster/\S+|"
                    r"tools/\S+|export|eval) .*)")  # what is typed, in a block that is not marked as such
SEVERAL = re.compile(r"hosts\.txt|--nnodes[ =](\d)|testbed\.sh")  # what asks for several machines
RANK = re.compile(r"--node[_-]rank[ =](\d)")
OF_THE_BED = re.compile(r"testbed\.sh|ssh_config")  # what is typed on the machine that has the test bed
BEFORE = {  # what the reader has done before -> here the same, or what stands in for it
    "git diff step4": "sed -i 's/^class RMSNorm/# a change\\n&/' step4_tensor_parallel/model.py",
    "python tools/steps.py check": "git checkout -q .",
    "same-numbers one many": """python -m same_numbers.trainers tp one
torchrun --nproc_per_node 2 -m same_numbers.trainers tp many""",
    "scp -r models": """python -c '
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
folder, tokenizer = "models/smollm2-135m-instruct", AutoTokenizer.from_pretrained("assets/tiny_llama")
tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\\n{% endfor %}"
tokenizer.save_pretrained(folder)
LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=30, eos_token_id=0,
                             num_attention_heads=4, num_key_value_heads=4)).save_pretrained(folder)'""",
}
SHORTER = {  # program -> flags that cut a run short, and what tells that it is short enough already
    r"tools/with_torch\.py": ("--steps 2 --seq_len 16", r"--steps"),
    r"step\d\w*/train\.py": ("--max_tokens 20480", r"--max_tokens (\d{1,4}|[1-3]\d{4})\b|--steps"),
    r"/run_(causal_lm|gpt2|llama|qwen|bert|vit)\.py": ("--steps 3", r"--steps"),
    r"--max_steps 5000": ("--max_steps 20", r"--max_steps \d\d\b"),
    r"--local_steps 50": ("--max_steps 3", r"--max_steps"),
    r"/train_distributed\.py": ("--max_steps 50", r"--max_steps"),
    r"/three_stages_simple_pp\.py": ("--train_steps 20", r"--train_steps"),
}
# These end with an error, and the reader's shell goes on.
FAILS = re.compile(r"try\.py check|break_it\.py (sizes|order|\w+ --find)|--timeout \d|<<'END'\nimport os, sys|undivided")
SECOND_TERMINAL = """({}) > first.txt 2>&1 &
until [ "$(find . -name first.txt -size +0 -mmin +0.4)" ]; do sleep 1; done
cat first.txt
{}"""
OWN = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "bash", "-c",
       'ip link set lo up && exec bash -eo pipefail "$0"']
SHELL = ["bash", "-eo", "pipefail"]
MACHINE = SHELL if subprocess.run(f"{shlex.join(OWN)} /dev/null", shell=True, stderr=subprocess.DEVNULL).returncode else OWN
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy":
           ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1", "GLOO_SOCKET_IFNAME": "lo"}
STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+) \| grad norm ([\d.]+)")
TOLERANCE = 2e-3  # relative, of losses and norms of float32 runs


class Block(NamedTuple):
    """`quoted`: what the page says that the command prints; `looked_for`: what a tour says to look for."""

    command: str
    quoted: str
    looked_for: str


def blocks(text: str) -> list[Block]:
    """The blocks of a page."""
    found = [Block(textwrap.dedent(command), textwrap.dedent(quoted), looked_for)
             for _, command, quoted, looked_for in BLOCK.findall(text)]
    assert len(found) == text.count("```bash"), "a block that is not closed, or two that were taken for one"
    return found


def lines_of(command: str) -> list[str]:
    """What is typed at a time: a line with those that go on with it."""
    return re.split(r"(?<=\n)(?=\S)(?!done)", command)


def is_left_out(page: pathlib.Path, line: str) -> bool:
    return any(line.startswith(beginning) for beginning, *_ in LEFT_OUT.get(str(page), ()))


def to_run(page: pathlib.Path) -> list[Block]:
    """The blocks of a page without the lines that are left out. Blocks of one time, several terminals, become one."""
    found = []
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        command = "".join(line for line in lines_of(block.command) if not is_left_out(page, line))
        before = found[-1] if found else block
        if "py-spy" in command:
            found[-1] = Block(SECOND_TERMINAL.format(before.command, command), before.quoted + block.quoted, "")
        elif found and RANK.search(command) and RANK.search(before.command):
            found[-1] = Block(before.command + command, before.quoted + block.quoted, "")
        elif command:
            found.append(block._replace(command=command))
    return found


PAGES = [page for page in READMES if to_run(page)]
ON_HOSTS = [page for page in PAGES if any(SEVERAL.search(block.command) for block in to_run(page))]
HERE = [page for page in PAGES if page not in ON_HOSTS]
EACH_PAGE = pytest.mark.parametrize("page", [  # of two processes, each takes the next one
    pytest.param(page, id=str(page), marks=pytest.mark.xdist_group(str(page))) for page in HERE])


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
    """The line without its numbers, paths and spaces, and without the names that runs get."""
    line = re.sub(r"\S*/\S*", "/", re.sub(r"\b[0-9a-f]{8}\b", "#", line))
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
        elif "..." not in line and words_of(line) not in words:
            if not (re.match(r"\[rank\d\]:", line) and "closing signal" in printed):  # torchrun ends the others as soon
                wrong.append(line)  # as one fails, some of them before they have spoken, or while they speak
    return wrong


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> pathlib.Path:
    """The repository's files, as they are now, committed."""
    target = tmp_path_factory.mktemp("repository")
    listed = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    subprocess.run("git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm all", shell=True,
                   cwd=target, check=True)
    return target


@pytest.fixture
def clone(repository, tmp_path) -> pathlib.Path:
    """A fresh clone, beside it a folder `bin` of what a machine may not have."""
    subprocess.run(["git", "clone", "-q", repository, tmp_path / "tutorial"], check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "bin" / "sudo").chmod(0o755)
    return tmp_path / "tutorial"


def run(command: str, folder: pathlib.Path, words: list[str] = MACHINE, seconds: float = 900) -> tuple[int | None, str]:
    """The exit code (None: it took too long) and what was printed. The first line that fails ends it."""
    path = f"{folder.parent}/bin:{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}:/usr/sbin:/sbin"
    answers = (("ssh-keygen", "\n\n\n"), ("exec node0 bash", "exit\n"), ("", "What is the state of the Union?\n"))
    typed = next(answer for words, answer in answers if words in command)
    (folder.parent / "typed").write_text(command)  # pgrep must not find it in the shell's own words
    process = subprocess.Popen([*words, folder.parent / "typed"], cwd=folder, text=True, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env=environment(PATH=path, **ALLOWED))
    try:
        printed, _ = process.communicate(typed, timeout=seconds)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def fault_of(block: Block, code: int | None, printed: str) -> str:
    """What is wrong with a block whose commands ended with `code`, or "". An error may be what it shows."""
    shown = block.quoted + "".join(line for line in printed.splitlines() if block.looked_for and block.looked_for in line)
    wrong = [f"quoted, but not printed: {line}" for line in unlike(block.quoted, printed)]
    if block.looked_for not in printed:
        wrong += [f"`{block.looked_for}` is not in what this prints"]
    if code is None or code and not ("error" in shown.lower() or FAILS.search(block.command)):
        wrong = [f"exit code {code}"]
    return "\n".join([f"$ {block.command}", *wrong, printed[-2000:]]) if wrong else ""


def paste(page: pathlib.Path, here: list[Block], folder: pathlib.Path, place=lambda command: command, words=MACHINE) -> None:
    """Runs the blocks; an AssertionError shows what is wrong with which."""
    wrong = []
    for block in here:
        command = "set +e\n" * bool(FAILS.search(block.command))
        command += "".join(f"{first}\n" for beginning, first in BEFORE.items() if block.command.startswith(beginning))
        command += re.sub(r"(?m)^(diff .*)$", r"\1 || [ $? = 1 ]",
                          block.command if block.looked_for else shortened(block.command))
        wrong.append(fault_of(block, *run(place(command.replace("/tmp/", f"{folder.parent}/")), folder, words)))
    assert not any(wrong), f"{len([*filter(None, wrong)])} of {len(wrong)} blocks of {page}:\n\n" + "\n\n".join(wrong)


@pytest.mark.slow
@EACH_PAGE
def test_first_block(page, clone):
    paste(page, to_run(page)[:1], clone)


@pytest.mark.slow
@pytest.mark.commands
@pytest.mark.drawn(6)
@EACH_PAGE
def test_commands(page, clone):
    paste(page, to_run(page), clone)


@pytest.fixture(scope="module")
def homes(bed, tmp_path_factory) -> dict[str, pathlib.Path]:
    """Each host's home, on its own disk. There is the virtual environment that --install finds there or makes, with the
    packages of this one, since no network leads out of the hosts."""
    found, folder = {}, tmp_path_factory.mktemp("hosts")
    for node in NODES:
        found[node] = home = pathlib.Path(DISKS, node, "home")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "tutorial" / ".venv"], check=True)
        packages = next(home.glob("tutorial/.venv/lib/python*/site-packages"))
        (packages / "these.pth").write_text(sysconfig.get_path("purelib"))
        (home / ".config" / "pip").mkdir(parents=True)
        (home / ".config" / "pip" / "pip.conf").write_text("[global]\nno-index = true\nno-build-isolation = false\n")
        users = re.sub("(?m)^root:.*", f"root:x:0:0::{home}:/bin/bash", pathlib.Path("/etc/passwd").read_text())
        (folder / node).write_text(users)
        testbed("exec", node, "mount", "--bind", folder / node, "/etc/passwd")
    return found


def typed(command: str, homes: dict[str, pathlib.Path]) -> str:
    """What types it on node0 or, where it says so, each line on the host of its rank, or all of it on several hosts."""
    if OF_THE_BED.search(command):
        return command
    head, *lines = re.split(r"(?m)^(?=torchrun .*--node[_-]rank)", command)
    several = SEVERAL.search(command)
    count = int(several[1] or 1) if several else 1
    parts = [(int(RANK.search(line)[1]), head + line) for line in lines] or [(k, command) for k in range(count)]
    words = []
    for k, part in parts:
        home = homes[f"node{k}"]
        inner = shlex.quote(f"set -eo pipefail; cd ~/tutorial\n{part}")
        words.append(f"{SCRIPT} exec node{k} env -u XDG_CACHE_HOME -u GLOO_SOCKET_IFNAME HOME={home} "
                     f"PATH={home}/tutorial/.venv/bin:$PATH bash -c {inner}")
    return words[0] if len(words) == 1 else " &\n".join([*words, "for job in $(jobs -p); do wait $job; done"])


@pytest.mark.hosts
@pytest.mark.parametrize("page", ON_HOSTS, ids=str)
def test_commands_on_hosts(page, clone, homes):
    for node, home in homes.items():
        for path in (home / "tutorial").iterdir():
            if path.name != ".venv":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(clone, homes["node0"] / "tutorial", dirs_exist_ok=True)
    first = "".join(lines_of(next(block.command for block in to_run(pathlib.Path("cluster/README.md"))
                                  if "--install" in block.command))[:2])  # hosts.txt, and the copies
    try:
        code, printed = run(typed(first, homes), clone, SHELL)
        assert code == 0, printed
        paste(page, to_run(page), clone, lambda command: typed(command, homes), SHELL)
    finally:
        run("tools/testbed.sh down", clone, SHELL)


def test_every_block_is_counted():
    """It runs or stands in the table with one of four reasons. No command is in a block of another kind."""
    counts = collections.Counter()
    for page in READMES:
        text = (ROOT / page).read_text(encoding="utf-8")
        entries = LEFT_OUT.get(str(page), [])
        for block in blocks(text):
            why = [kind for line in lines_of(block.command) for beginning, kind, _ in entries if line.startswith(beginning)]
            place = "on hosts" if page in ON_HOSTS else "here"
            counts[f"left out, {why[0]}" if len(why) == len(lines_of(block.command)) else f"run {place}" + ", in part" * bool(why)] += 1
        lines = [line for block in blocks(text) for line in lines_of(block.command)]
        for beginning, kind, _ in entries:
            assert kind in KINDS and any(line.startswith(beginning) for line in lines), f"{page}: {beginning}"
        others = re.findall(r"^ *```(?!bash)\w*\n(.*?)^ *```", BLOCK.sub("", text), re.S | re.M)
        hidden = [line for other in others for line in other.splitlines() if HIDDEN.fullmatch(line)]
        assert not hidden, f"{page}: mark the block as bash: {hidden}"
    print(f"\n{sum(counts.values())} blocks of {len(READMES)} pages:", *map("{0[1]} {0[0]}".format, counts.items()), sep="\n  ")
    assert set(LEFT_OUT) <= set(map(str, READMES))
