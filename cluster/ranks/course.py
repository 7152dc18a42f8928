"""Puts step 9's folder on the module path. This is the one place where cluster/ says which step it builds on."""

import logging
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEP9 = ROOT / "step9_heterogeneous_pp"
if str(STEP9) not in sys.path:
    sys.path.append(str(STEP9))
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it warns that one kernel is not there
