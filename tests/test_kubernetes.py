"""The manifest and the image: what they say fits together, and the command trains on two nodes.

No cluster is here: what Kubeflow Trainer does with the manifest is taken from its source
(pkg/runtime/framework/plugins/torch/torch.go of kubeflow/trainer, v2.3).
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.processes import ROOT, free_port, start, summary
from tests.test_launch import SHORT, finish_all

DOCKERFILE = [
    shlex.split(line)
    for line in (ROOT / "Dockerfile").read_text().splitlines()
    if line and not line.startswith("#")
]
MANIFEST = (ROOT / "scripts" / "kubernetes" / "trainjob.yaml").read_text()
CLAIM, RUNTIME, JOB = yaml.safe_load_all(MANIFEST)
TRAINER = JOB["spec"]["trainer"]
(NODE,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
POD = NODE["template"]["spec"]["template"]["spec"]


def test_the_parts_of_the_manifest_fit_together() -> None:
    kinds = [(part["apiVersion"], part["kind"]) for part in (CLAIM, RUNTIME, JOB)]
    trainer = "trainer.kubeflow.org/v1alpha1"
    assert kinds == [
        ("v1", "PersistentVolumeClaim"),
        (trainer, "TrainingRuntime"),
        (trainer, "TrainJob"),
    ]
    reference = JOB["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (
        "TrainingRuntime",
        RUNTIME["metadata"]["name"],
    )
    # The operator looks for the step by this label, and for the container by its name.
    labels = NODE["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = POD["containers"]
    assert (NODE["name"], container["name"]) == ("node", "node")
    assert "torch" in RUNTIME["spec"]["mlPolicy"], "or no PET_ variable is set"
    assert TRAINER["numNodes"] == RUNTIME["spec"]["mlPolicy"]["numNodes"] == 2
    assert TRAINER["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == TRAINER["numProcPerNode"]


def test_volumes_and_restarts() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    (container,) = POD["containers"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
    assert RUNTIME["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert NODE["template"]["spec"]["backoffLimit"] == 0
    assert POD["restartPolicy"] == "Never"
    assert "--resume" in TRAINER["command"]
    assert any(word.startswith("--run-dir=/shared/") for word in TRAINER["command"])


def test_the_image_has_what_the_command_needs() -> None:
    (base,) = [line[1] for line in DOCKERFILE if line[0] == "FROM"]
    torch = base.partition("pytorch/pytorch:")[2].partition("-")[0]
    assert tuple(map(int, torch.split("."))) >= (2, 9), "requirements.txt would install it anew"
    sources = [source for line in DOCKERFILE if line[0] == "COPY" for source in line[1:-1]]
    assert all(list(ROOT.glob(source)) for source in sources)
    copied = {path.name for source in sources for path in ROOT.glob(source)}
    assert copied >= {*(path.name for path in ROOT.glob("*.py")), "utils", "requirements.txt"}
    text = (ROOT / "Dockerfile").read_text()
    assert json.loads(text.rpartition("\nCMD ")[2])[0] == TRAINER["command"][0] == "torchrun"
    (container,) = POD["containers"]
    assert container["image"] in text


@pytest.mark.slow
def test_the_command_trains_on_two_nodes_and_goes_on(synthetic_dir: Path, tmp_path: Path) -> None:
    """As the operator starts it, once for each node; and again, as after a failure."""
    run_dir = tmp_path / "runs" / "mnist-ddp"
    assert summary_of(tmp_path, synthetic_dir, 10)["world_size"] == 2
    assert summary_of(tmp_path, synthetic_dir, 20)["resumed_from"] == 10
    assert sorted(path.name for path in run_dir.parent.iterdir()) == ["mnist-ddp"]


def summary_of(shared: Path, data: Path, max_steps: int) -> dict[str, Any]:
    """Run the command in the place of the pods and return what the training left."""
    command = " ".join(TRAINER["command"]).replace("/shared/data", str(data))
    command = command.replace("/shared", str(shared))
    short = SHORT.replace("--max-steps 20", f"--max-steps {max_steps}")
    variables = {
        "PET_NNODES": str(TRAINER["numNodes"]),
        "PET_NPROC_PER_NODE": str(TRAINER["numProcPerNode"]),
        "PET_MASTER_ADDR": "127.0.0.1",  # there: the name of the first pod in the headless service
        "PET_MASTER_PORT": str(free_port()),  # there: 29500
    }
    nodes = [
        start("bash", "-c", f"{command} {short}", PET_NODE_RANK=str(node), **variables)
        for node in range(TRAINER["numNodes"])
    ]
    for ended in finish_all(nodes, 120):
        assert ended.returncode == 0, ended.text
    return summary(shared / "runs" / "mnist-ddp")
