"""All faults, by name."""

from museum import faults_data, faults_trainers
from museum.fault import Fault

FAULTS: dict[str, Fault] = {fault.name: fault for fault in faults_data.FAULTS + faults_trainers.FAULTS}
