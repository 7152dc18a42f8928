"""What TorchX would submit, and the YAML files for Kubernetes and rented machines: loaded by those who would run them.

None of it leaves this machine. SkyPilot needs older packages than the course, so .ci/run gives it an environment of its
own, which has none of torch and TorchX.
"""

import os
import subprocess

import pytest
from lab.launch import ROOT

pytestmark = pytest.mark.slow  # they need packages that the default tests do without
FLAGS = "--tp_size 2 --checkpoint_dir /shared/checkpoints"
JOB = ("-j 2x8 --cpu 8 --gpu 8 --mounts type=bind,src=/mnt/shared,dst=/shared "
       f"--script cluster/train_distributed.py -- {FLAGS}")
RUN = f"--nnodes 2 --nproc_per_node 8 --tee 3 --role '' cluster/train_distributed.py {FLAGS}"
MISSING = "no {} here: pip install -c constraints.txt -e '.[engines]'"


@pytest.mark.parametrize("scheduler, package, wanted", [  # wanted: text -> how often it is in what is submitted
    ("slurm", "torchx", {RUN: 2, "#SBATCH hetjob": 1, "#SBATCH --job-name": 2, "HET_GROUP_0:=": 2,
                         "--ntasks-per-node=1 --cpus-per-task=8 --mem=16000 --gpus-per-task=8": 2}),
    ("kubernetes", "kubernetes", {RUN: 2, "queue: default": 1, "replicas: 1": 2, "image: python:3.11-slim": 2,
                                  "limits: cpu: 8000m memory: 16000M nvidia.com/gpu: '8'": 2,
                                  "hostPath: path: /mnt/shared name: mount-0": 2,
                                  "mountPath: /shared name: mount-0": 2}),
    ("aws_batch", "boto3", {RUN: 1, "queue: default": 1, "numNodes: 2": 1, "targetNodes: 0:1": 1, "type: multinode": 1,
                            "image: python:3.11-slim": 1, "type: GPU value: '8'": 1,
                            "host: sourcePath: /mnt/shared name: mount_0": 1,
                            "containerPath: /shared readOnly: false sourceVolume: mount_0": 1}),
    ("gcp_batch", "google.cloud.batch_v1", {  # TorchX mounts nothing there
        RUN: 1, "task_count: 2": 1, "task_count_per_node: 1": 1, 'image_uri: "python:3.11-slim"': 1,
        'machine_type: "a2-highgpu-8g"': 1}),  # with eight GPUs
])
def test_what_torchx_submits(scheduler, package, wanted, monkeypatch, tmp_path):
    """By `torchx run --dryrun -s scheduler dist.ddp JOB`, with the .torchxconfig of the root."""
    for name in ("torchx", package):
        pytest.importorskip(name, reason=MISSING.format(name))
    from torchx.runner import get_runner
    from torchx.runner.config import apply, load_sections

    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path))  # with nobody's account
    cfg = {"project": "none"} if scheduler == "gcp_batch" else {}
    with get_runner(component_defaults=load_sections("component", [str(ROOT)])) as runner:
        apply(scheduler, cfg, [str(ROOT)])
        request = runner.dryrun_component("dist.ddp", JOB.split(), scheduler, cfg=cfg, workspace=None).request
    text = str(request.job_def if scheduler == "gcp_batch" else request)
    text = " ".join(text.replace("'\"'\"'", "'").replace("\\'", "'").split())
    assert {each: text.count(each) for each in wanted} == wanted, text


def test_the_trainjob():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=MISSING.format("kubeflow-trainer-api"))
    yaml = pytest.importorskip("yaml")
    words = yaml.safe_load((ROOT / "cluster" / "engines" / "trainjob.yaml").read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(words).to_dict() == words  # what they don't know is dropped
    spec = words["spec"]
    trainer, args = spec["trainer"], spec["trainer"]["args"]
    assert (words["kind"], spec["runtimeRef"]["name"]) == ("TrainJob", "torch-distributed")
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["command"]) == (2, 8, ["torchrun"])
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8" and (ROOT / args[0]).is_file()
    (node,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (volume,), (container,) = pod["volumes"], pod["containers"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/shared"}]
    assert "persistentVolumeClaim" in volume and node["name"] == container["name"] == "node"
    assert all(args[args.index(flag) + 1].startswith("/shared/") for flag in ("--checkpoint_dir", "--log_dir"))


def test_the_rented_machines(tmp_path):
    """The task as SkyPilot loads it, and what its command becomes on the second machine."""
    sky = pytest.importorskip("sky", reason="no SkyPilot here: pip install skypilot, in an environment of its own")
    task = sky.Task.from_yaml(str(ROOT / "cluster" / "engines" / "skypilot.yaml"))
    (resources,) = task.resources
    assert task.num_nodes == 2 and resources.accelerators == {"H100": 8}
    assert task.storage_mounts["/shared"].mode.value == "MOUNT_CACHED"
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho $@\n")
    (tmp_path / "torchrun").chmod(0o755)
    machine = dict(SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1", SKYPILOT_NUM_GPUS_PER_NODE="8",
                   SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", PATH=f"{tmp_path}:{os.environ['PATH']}")
    said = subprocess.run(["bash", "-c", task.run], env={**task.envs, **machine}, capture_output=True, text=True).stdout
    assert said.split() == (
        "--nnodes 2 --node_rank 1 --nproc_per_node 8 --master_port 29500 --master_addr 10.0.0.1 "
        "step8_pipeline_parallel_1f1b/train.py --tp_size 2 --pp_size 2 --dp_size 4 --micro_batch_size 2 "
        "--dataset_name /shared/corpus --log_dir /shared/runs").split()
