"""What one types for a chat, on its way through launch_cluster.sh."""

import ast
import os
import re
import subprocess
import sys

from launch import ROOT, environment, modules_of
from launcher import make_tools, write_hosts

with modules_of(9):
    from hosts.host_facts import ASKS

ECHO = f"""import sys
print({ASKS!r}, flush=True)
for line in sys.stdin.buffer:
    print("got", line, flush=True)
print("end", flush=True)
"""


def test_what_one_types_at_the_launcher(tmp_path):
    """Goes to the host that asks for it, line by line as it is; its end, too."""
    tools = make_tools(tmp_path)
    (tmp_path / "echo.py").write_text(ECHO)
    typed = "one\n\n two é \n".encode() + b"\xff\n" + b"x" * 200_000 + b"\nlast"
    command = [ROOT / "cluster" / "launch_cluster.sh", write_hosts(tmp_path, f"a python={tools}/python"), "--",
               tmp_path / "echo.py", "--chat"]
    variables = environment(PATH=f"{tools}:{os.environ['PATH']}", PYTHON=sys.executable)
    done = subprocess.run(list(map(str, command)), input=typed, env=variables, capture_output=True, timeout=60)
    got = re.findall(r"a \| got (.*)", done.stdout.decode())
    assert done.returncode == 0 and list(map(ast.literal_eval, got)) == typed.splitlines(keepends=True)
    assert done.stdout.decode().endswith("a | end\n")
