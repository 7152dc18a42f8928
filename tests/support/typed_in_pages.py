"""What the pages have typed: their blocks, which lines can't run and why, what is cut short, what is compared."""

import pathlib
import re
import textwrap
from typing import NamedTuple

from lab.launch import ROOT
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
        ("cluster/launch_cluster.sh hosts.txt -- cluster/train_distributed.py --model_name Hugging", NETWORK, "the Hub"),
        ("python cluster/generate.py --adapter checkpoints/speeches --chat\n", NETWORK, "what the line above trains"),
        ("sudo sed -i", NETWORK, "names in the reader's own"), ("sudo tee -a", NETWORK, "likewise"),
        ("sudo ufw", NETWORK, "a firewall is that of the reader's own"),
        ("python tools/get_smollm2.py", NETWORK, "270 MB: test_tool_get_smollm2.py; here a small model stands in"),
        ("pip install", NETWORK, "a package")],
    "cluster/LAUNCH.md": [("apt-get install", NETWORK, "packages")],
    "cluster/RASPBERRY_PI.md": [("for host in pi0", NETWORK, "packages"), ("sudo apt-get", NETWORK, "a package"),
                                ("echo 'PERCENT", NETWORK, "what that package reads")],
    "cluster/RESULTS.md": [("python tools/maintain/measure_hosts.py", HOUR, "test_tool_benchmark.py has parts of it")],
    "cluster/SLOW_LINKS.md": [("python tools/maintain/measure_hosts.py", HOUR, "")],
    "docs/FOUND.md": [("python same_numbers/found/torchtitan", NETWORK, "torchtitan, and the torch that it needs")],
    "notebooks/README.md": [("pip install", NETWORK, "packages, and a server that the reader ends")],
    "docs/SCOREBOARD.md": [("python tools/maintain/scoreboard.py", NETWORK, "environments of thirteen libraries")],
    "docs/FLAGS.md": [("torchrun --nproc_per_node 8", NETWORK, "the Hub"),
                      ("torchrun --nproc_per_node 3", NETWORK, "the Hub")],
    "docs/LAUNCHERS.md": [
        ("pip install", NETWORK, "packages"),
        ("torchx run -s slurm", GPU, "16"), ("torchx run -s kubernetes", GPU, "16"),
        ("python runs/on_ray.py --nproc_per_node 8", GPU, "16"), ("docker build", NETWORK, "a registry"),
        ("kubectl", GPU, "16: test_cluster_engines_rendered.py")],
}
KINDS = {NETWORK, GPU, HOUR, CI}
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
LlamaForCausalLM(LlamaConfig(vocab_size=1024, hidden_size=32, intermediate_size=64, num_hidden_layers=30,
                             num_attention_heads=4, num_key_value_heads=4, eos_token_id=0)).save_pretrained(folder)'""",
}
SHORTER = {  # program -> flags that cut a run short, and what tells that it is short enough already
    r"--run_name lag\$lag": ("--max_tokens 4096", r"--max_tokens 4096"),
    r"--lag \$lag \\\n": ("--gradient_accumulation_steps 2 --max_tokens 3072", r"accumulation"),
    r"--dtype \$dtype": ("--gradient_accumulation_steps 2 --max_tokens 1024", r"accumulation"),
    r"--generators 1 --max_tokens 40960$": ("--max_tokens 10240", r"--max_tokens 10240"),
    r"tools/with_torch\.py": ("--steps 2 --seq_len 16", r"--steps"),
    r"step\d\w*/train\.py": ("--max_tokens 20480", r"--max_tokens (\d{1,4}|[1-3]\d{4})\b|--steps|dry_run"),
    r"/run_(causal_lm|gpt2|llama|qwen|bert|vit)\.py": ("--steps 3", r"--steps"),
    r"--run_name speeches": ("--gradient_accumulation 1 --eval_batches 2", r"n 1 --eval"),
    r"--base_bits 4": ("--max_steps 5", r"--max_steps 5$"),
    r"--max_steps_per_epoch 20": ("--max_steps_per_epoch 5", r"epoch 5"),
    r"/train_single_test\.py": ("--max_batch_size 16", r"--max_batch_size"),
    r"--max_steps 5000": ("--max_steps 20", r"--max_steps \d\d\b"),
    r"--local_steps 50": ("--local_steps 3 --max_steps 6", r"--max_steps"),
    r"/train_distributed\.py": ("--max_steps 20", r"--max_steps"),
    r"/three_stages_simple_pp\.py": ("--train_steps 20", r"--train_steps"),
}
# These end with an error, and the reader's shell goes on.
FAILS = re.compile(r"try\.py check|break_it\.py (sizes|order|\w+ --find)|--timeout \d|<<'END'\nimport os, sys|undivided|"
                   r"shifted")
BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```\n(?:\s*(?:<details>(?:(?!</summary>|```).)*</summary>\s*)?^\1```\n(.*?)"
                   r"^\1```|\nLook for `([^`]+)`\.)?", re.S | re.M)
SECOND_TERMINAL = """({}) > first.txt 2>&1 &
until [ "$(find . -name first.txt -size +0 -mmin +0.4)" ]; do sleep 1; done
cat first.txt
{}"""
SEVERAL = re.compile(r"hosts\.txt|--nnodes[ =](\d)|testbed\.sh")  # what asks for several machines
RANK = re.compile(r"--node[_-]rank[ =](\d)")
STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+) \| grad norm ([\d.]+)")
EXACT = re.compile(r"tools/(choose|dry_run|what_if)\.py")  # numbers that formulas give, the same everywhere
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


def words_of(line: str) -> str:
    """The line without its numbers, paths and spaces, and without the names that runs get."""
    line = re.sub(r"\S*/\S*", "/", re.sub(r"\b[0-9a-f]{8}\b", "#", line))
    line = re.sub(r"(?<![A-Za-z_])-?\d[\d.,]*(e[+-]?\d+)?[KMGBT%x]*", "#", line)
    return re.sub(r"[\s#'-]+", " ", line).strip()


def unlike(quoted: str, printed: str, exact: bool = False) -> list[str]:
    """The lines that the README quotes and that were not printed so. "..." stands for any lines."""
    lines = [line.strip() for line in printed.splitlines()]
    same = {"".join(line.split()) for line in lines}
    found, words = STEP.findall(printed), words_of(" ".join(lines))  # two ranks may have printed into one line
    wrong = ["step ...\n    but no such line"] if STEP.search(quoted) and not found else []
    for line in quoted.splitlines():
        if step := STEP.match(line.strip()):
            rows = [row for row in found if row[0] == step[1]]
            near = [row for row in rows if all(abs(float(a) - float(b)) <= TOLERANCE * float(b) + 1e-3
                                               for a, b in zip(row[1:], step.groups()[1:]))]
            if rows and not near:
                wrong.append(f"{line}\n    but printed {rows}")
        elif "..." not in line and (exact or line.startswith("@@")) and "".join(line.split()) not in same | {""}:
            wrong.append(line)
        elif "..." not in line and words_of(line) not in words:
            if not (re.match(r"\[rank\d\]:", line) and "closing signal" in printed):  # torchrun ends the others as soon
                wrong.append(line)  # as one fails, some of them before they have spoken, or while they speak
    return wrong


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


PAGES = [page for page in READMES if to_run(page)]
ON_HOSTS = [page for page in PAGES if any(SEVERAL.search(block.command) for block in to_run(page))]
HERE = [page for page in PAGES if page not in ON_HOSTS]
