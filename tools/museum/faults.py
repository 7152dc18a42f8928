"""All faults, by name. A module of more of them is a word in MODULES."""

import importlib
import importlib.util

from museum.fault import Fault

MODULES = ("data", "model", "pipeline", "trainers", "more_a", "more_b", "more_c")
FAULTS: dict[str, Fault] = {
    fault.name: fault for module in MODULES if importlib.util.find_spec(f"museum.faults_{module}")
    for fault in importlib.import_module(f"museum.faults_{module}").FAULTS}
