"""The manifest and the image fit together, and their command trains on two nodes.

No cluster is here: what Kubeflow Trainer does with the manifest is taken from its source
(pkg/runtime/framework/plugins/torch/torch.go of kubeflow/trainer, v2.3).
"""

import pytest
import yaml

from tests.processes import ROOT, finish, free_port, shell_line, start, summary

DOCKERFILE = (ROOT / "Dockerfile").read_text()
MANIFEST = (ROOT / "scripts" / "kubernetes" / "trainjob.yaml").read_text()
CLAIM, RUNTIME, JOB = yaml.safe_load_all(MANIFEST)
TRAINER = JOB["spec"]["trainer"]


def test_the_parts_of_the_manifest_and_the_image_fit_together():
    reference = JOB["spec"]["runtimeRef"]
    assert reference == {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    (node,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    # The operator looks for the step by this label, and for the container by its name.
    assert "trainer.kubeflow.org/trainjob-ancestor-step: trainer" in MANIFEST
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"]) == ("node", "node")
    assert "torch" in RUNTIME["spec"]["mlPolicy"], "or no PET_ variable is set"
    assert TRAINER["numNodes"] == RUNTIME["spec"]["mlPolicy"]["numNodes"] == 2
    assert TRAINER["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == TRAINER["numProcPerNode"] == 1
    names = {mount["name"] for mount in container["volumeMounts"]}
    assert names == {volume["name"] for volume in pod["volumes"]} == {"shm", "shared"}
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "emptyDir" not in v
    ]
    assert claims == [CLAIM["metadata"]["name"]]
    copied = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY")]
    assert all(list(ROOT.glob(source)) for sources in copied for source in sources)
    assert container["image"] in DOCKERFILE
    assert TRAINER["command"][0] in DOCKERFILE.rpartition("\nCMD ")[2]


@pytest.mark.slow
def test_the_command_trains_on_two_nodes_and_goes_on(synthetic_dir, tmp_path):
    """As the operator starts it, once for each node; and again, as after a failure."""
    command = " ".join(TRAINER["command"]).replace("/shared/data", str(synthetic_dir))
    command = command.replace("/shared", str(tmp_path))
    for max_steps, resumed_from in ((10, None), (20, 10)):
        short = f"--dataset synthetic --model linear --threads 1 --max-steps {max_steps}"
        # There: the first pod's name in the headless service, and 29500.
        variables = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
        variables |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
        words, _ = shell_line(f"{command} {short}")
        for node in [start(*words, PET_NODE_RANK=str(i), **variables) for i in range(2)]:
            ended = finish(node, 150)  # torchrun may print that the other agent left first
            assert ended.returncode == 0, ended.text
        facts = summary(tmp_path / "runs" / "mnist-ddp")
        assert (facts["world_size"], facts["resumed_from"]) == (2, resumed_from)
