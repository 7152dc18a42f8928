"""All faults, by name."""

from museum import faults_data, faults_model, faults_pipeline, faults_rollouts, faults_trainers
from museum.fault import Fault

LISTS = (faults_data, faults_model, faults_pipeline, faults_trainers, faults_rollouts)
FAULTS: dict[str, Fault] = {fault.name: fault for each in LISTS for fault in each.FAULTS}
