"""The manifest's command trains on two nodes, with what the image has.

No cluster is here: what Kubeflow Trainer does with the manifest is taken from its source
(pkg/runtime/framework/plugins/torch/torch.go of kubeflow/trainer, v2.3).
"""

import shutil
import sys

import pytest
import yaml

from tests.processes import ROOT, finish, free_port, run, shell_line, start, succeed, summary

MANIFEST = (ROOT / "scripts" / "kubernetes" / "trainjob.yaml").read_text()
*_, JOB = yaml.safe_load_all(MANIFEST)
TRAINER = JOB["spec"]["trainer"]


@pytest.fixture
def image(tmp_path):
    """A folder with what the Dockerfile copies, and nothing else."""
    folder = tmp_path / "project"
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"]:
            for source in (path for word in words[1:-1] for path in ROOT.glob(word)):
                if source.is_dir():
                    shutil.copytree(source, folder / words[-1])
                else:
                    folder.mkdir(exist_ok=True)
                    shutil.copy(source, folder / words[-1])
    return folder


def test_the_image_has_all_that_a_training_imports(image, synthetic_dir):
    words = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--model", "linear"]
    command = [sys.executable, "train_ddp.py", *words, "--max-steps", 2, "--threads", 1]
    succeed(run(*command, cwd=image))


@pytest.mark.slow
def test_the_command_trains_on_two_nodes_and_goes_on(image, synthetic_dir, tmp_path):
    """As the operator starts it, once for each node; and again, as after a failure."""
    command = " ".join(TRAINER["command"]).replace("/shared/data", str(synthetic_dir))
    command = command.replace("/shared", str(tmp_path))
    for max_steps, resumed_from in ((10, None), (20, 10)):
        short = f"--dataset synthetic --model linear --threads 1 --max-steps {max_steps}"
        # There: the first pod's name in the headless service, and 29500.
        variables = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
        variables |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
        words, _ = shell_line(f"{command} {short}")
        nodes = [start(*words, cwd=image, PET_NODE_RANK=str(i), **variables) for i in range(2)]
        for node in nodes:
            ended = finish(node, 150)  # torchrun may print that the other agent left first
            assert ended.returncode == 0, ended.text
        facts = summary(tmp_path / "runs" / "mnist-ddp")
        assert (facts["world_size"], facts["resumed_from"]) == (2, resumed_from)
