"""Puts tools/ on Python's path, where launch.py is: to be imported first by what is started in this folder."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
