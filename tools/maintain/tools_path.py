"""Puts tools/ on Python's path, where launch.py is: to be imported first by the programs of this folder."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
