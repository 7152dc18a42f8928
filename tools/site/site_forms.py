"""The pages that are forms: the playground of schedules, and "How to split"."""

import itertools
import json
import pathlib
import sys

import jinja2

from lab.launch import ROOT, modules_of

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(ROOT / "cluster"))
with modules_of(9):
    from planning.schedules import SCHEDULES as OF_PLANNER

    from sizes.data_sheets import PRESETS
with modules_of(11):
    from virtual_stages import SCHEDULES as OF_STEPS


def write_forms() -> dict[str, str]:
    """Page -> its HTML. The playground has the lists of actions of all schedules in it."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)
    return {name: environment.get_template(f"{name}.html").render(models=PRESETS, schedules=json.dumps(schedules()))
            for name in ("playground", "choose")}


def schedules() -> dict[str, dict]:
    """name -> stages -> micro-batches -> what each stage does, as "F0 F1 B0": all that the playground's form can ask
    for. A stroke stands behind what is of the second chunk."""
    found = {}
    for (name, schedule), p, m in itertools.product((OF_PLANNER | OF_STEPS).items(), range(1, 9), range(1, 17)):
        chunks = [2] if name.startswith("interleaved") else []
        stages = [" ".join("{}{}{}".format(*action[:2], "'" * (*action, 0)[2]) for action in schedule(s, p, m, *chunks))
                  for s in range(p)]
        found.setdefault(name, {}).setdefault(p, {})[m] = stages
    return found
