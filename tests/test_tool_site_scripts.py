"""The site's JavaScript plays schedules as Python does."""

import json
import shutil
import subprocess

import make_site  # noqa: F401  makes known where the site's modules are
import pytest
from lab.launch import ROOT
from lab.watch.schedule import play
from site_forms import schedules

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="the site's JavaScript needs apt-get install nodejs")


def node(script: str, argument) -> object:
    """What `script`, the body of a JavaScript function of `input` and play(), returns for `argument`."""
    load = f"const {{ play }} = require({json.dumps(str(ROOT / 'tools' / 'site' / 'simulation'))});"
    program = (f"{load} const input = JSON.parse(require('fs').readFileSync(0));"
               f"process.stdout.write(JSON.stringify((() => {{ {script} }})()))")
    done = subprocess.run(["node", "-e", program], input=json.dumps(argument), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 3, 1.5), (1, 1.25, 0.5)], ids=str)
def test_schedules_are_played_as_in_python(costs):
    """With two chunks, a chunk takes half of a stage's time. No message takes any."""
    cases, seconds = [], dict(zip("FBW", costs))
    for name, sizes in schedules().items():
        cases += [[[(word[0], int(word[1:].rstrip("'")), word.count("'")) for word in stage.split()] for stage in stages]
                  for of_stages in sizes.values() for m, stages in of_stages.items() if m in (1, 2, 3, 7, 16)]
    found = node("""return input.cases.map((actions) => play(actions, input.seconds, 0, actions.map(() => 1)));""",
                 {"cases": cases, "seconds": seconds})
    for actions, result in zip(cases, found, strict=True):
        played = play(actions, {kind: each / result["v"] for kind, each in seconds.items()})
        assert not any(played.left) and result["live"] == played.peaks
        assert result["makespan"] == pytest.approx(played.end, rel=1e-12)
        spans = [[s, *span[:3]] for s, spans in enumerate(played.spans) for span in spans]
        assert sorted(list(span.values())[:4] for span in result["spans"]) == sorted(spans)



@needs_node
def test_messages_take_time_and_machines_have_speeds():
    """One micro-batch on two stages, of which the second is twice as fast: there and back."""
    case = {"actions": [[("F", 0, 0), ("B", 0, 0)]] * 2, "costs": {"F": 1, "B": 2, "W": 3}}
    found = node("return play(input.actions, input.costs, 10, [1, 2]);", case)
    assert (found["makespan"], found["messages"]) == (1 + 10 + 0.5 + 2.5 + 10 + 5, 2)
