"""SmolLM2 talks over three hosts of the test bed of which none has the memory for it, and is fine-tuned there.

Needs models/smollm2-135m-instruct: tools/get_smollm2.py makes it.
"""

import re
import subprocess
import sys

import pytest
import torch
from bed import NODES, SSH_CONFIG, bed, testbed
from elastic_bed import nothing_runs, switch_on
from launch import ROOT, environment
from launcher import Launch, write_hosts
from processes import eventually

MODEL = ROOT / "models" / "smollm2-135m-instruct"
pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__),
              pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is missing: python tools/get_smollm2.py")]
PROMPTS = ["The capital of France is", "Once", "My fellow citizens, at this second appearing to take the oath of the "
           "presidential office there is less occasion for an extended address", "2 + 2 =", "Water boils when"]
LIMIT, TOKENS = 800, 100  # MB of memory of a host; greedy tokens behind each prompt
FLAGS = ["cluster/generate.py", "--checkpoint", MODEL, "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """(texts of transformers, texts with an adapter, the adapter)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def write() -> str:
        inputs = [tokenizer(prompt, return_tensors="pt", add_special_tokens=False) for prompt in PROMPTS]
        return "".join(tokenizer.decode(model.generate(**each, max_new_tokens=TOKENS, do_sample=False)[0],
                                        skip_special_tokens=True) + "\n" for each in inputs)

    plain, path = write(), tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.02)
    model.save_pretrained(path)
    return plain, write(), path


@pytest.fixture
def hosts(tmp_path):
    for node in NODES:
        testbed("memory", node, LIMIT)
    yield write_hosts(tmp_path, *(f"{node} python={sys.executable}" for node in NODES))
    testbed("memory", "all", "off")


def written(printed: str) -> str:
    """What the first host has printed behind the table of the ranks."""
    rows = [row.removeprefix("node0 | ") for row in printed.splitlines() if row.startswith("node0 | ")]
    start = next(k for k, row in enumerate(rows) if row.startswith("pipeline 0: ")) + 1
    return "".join(f"{row}\n" for row in rows[start:] if not re.match(r"\d+ tokens in ", row))


def test_prompts(hosts, expected):
    plain, adapted, adapter = expected
    words = [*FLAGS, "--max_new_tokens", TOKENS, *(word for prompt in PROMPTS for word in ("--prompt", prompt))]
    alone = testbed("exec", "node0", sys.executable, *words, cwd=ROOT, env=environment(), check=False, timeout=100)
    assert alone.returncode != 0, "one host can hold it"
    for more, texts in ([], plain), (["--adapter", adapter], adapted):
        run = Launch(hosts, "--", *words, *more, options=f"-F {SSH_CONFIG}")
        code, printed = run.end(200)
        assert code == 0, printed[-3000:]
        print(*re.findall(r"\d+ tokens in .*", printed))
        assert written(printed).endswith(texts)  # a library may warn before
    assert adapted != plain


def test_a_chat_that_loses_a_host(hosts, tmp_path):
    variables = environment(SSH_OPTIONS=f"-F {SSH_CONFIG}", PYTHON=sys.executable)
    command = [ROOT / "cluster" / "launch_cluster.sh", hosts, "--", *FLAGS, "--chat", "--max_new_tokens", 12]
    with open(tmp_path / "printed", "w") as output:
        run = subprocess.Popen(list(map(str, command)), env=variables, stdin=subprocess.PIPE, stdout=output,
                               stderr=output, text=True)

    def answers() -> list[str]:
        return written(text).splitlines()[1:] if "write a line" in (text := (tmp_path / "printed").read_text()) else []

    for number, line in enumerate(("What is the capital of France?", "And of Italy?"), 1):
        run.stdin.write(f"{line}\n")
        run.stdin.flush()
        assert eventually(lambda: len(answers()) >= number or run.poll() is not None, 100)
    assert "Paris" in answers()[0], (tmp_path / "printed").read_text()
    testbed("cut", "node2")
    try:
        assert run.wait(90) not in (0, None)
        printed = (tmp_path / "printed").read_text()
        print(answers(), printed[-600:])
        assert "launch_cluster: node2 (node rank 2) failed first" in printed and "Traceback" not in printed
        assert eventually(nothing_runs, 30), "a host ends its part when it does not hear of the launcher any more"
    finally:
        switch_on("node2")
