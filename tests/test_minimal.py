"""The minimal scripts train as well and evaluate as exactly as the long ones."""

import ast
import json
import os
import re
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import models
from tests.minimal import FOLDER, RESULT, TIMEOUT, result, train
from tests.processes import (
    ALTERED,
    ROOT,
    STANDALONE,
    error_line,
    finish,
    free_port,
    run,
    shell_line,
    start,
    wait_until,
)

IMAGES = 1920  # in short_dir
# Of the only rank, without torchrun.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def test_a_reader_replaces_two_imports():
    for path in FOLDER.glob("*.py"):
        names = {*re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)}
        assert names - sys.stdlib_module_names == {"torch", "data", "models"}, path


@pytest.mark.parametrize(("script", "variables"), [("ddp", {}), ("ddp_complete", {"RANK": "0"})])
def test_without_torchrun_one_line_says_how_to_start_it(script, variables, tmp_path):
    ended = run(sys.executable, FOLDER / f"{script}.py", cwd=tmp_path, **variables)
    command = f"torchrun --standalone --nproc_per_node 2 {FOLDER / script}.py"
    assert (ended.returncode, ended.text) == (2, f"start it with: {command}\n")


def docstring_command(script, number, data_dir):
    """Return a command of a script's docstring, to be given from any folder."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{script}.py").read_text())) or ""
    line = [line for line in text.splitlines() if line[:4] == "    "][number]
    line = f"{' '.join(line.split())} --data-dir {data_dir}"  # Python has joined what continues
    return line.replace("scripts/", f"{ROOT}/scripts/")


@pytest.mark.parametrize(
    ("script", "number", "ranks"),
    [
        ("single", 1, 1),
        ("ddp", 0, 3),
        pytest.param("ddp_complete", 0, 3, marks=pytest.mark.slow),
    ],
)
def test_it_learns_and_evaluates_exactly(script, number, ranks, short_dir, tmp_path):
    """500 images do not divide by 3; the checkpoint is that of plain single-device code."""
    line = docstring_command(script, number, short_dir).replace("per_node 2", f"per_node {ranks}")
    command, _ = shell_line(f"{line} --dataset synthetic --epochs 2 --batch-size {96 // ranks}")
    ended = run(*command, cwd=tmp_path, timeout=TIMEOUT)
    loss, accuracy = result(ended)
    assert [epoch for epoch, *_ in RESULT.findall(ended.stdout)] == ["1", "2"], "one rank reports"
    assert accuracy > 80, "nothing was learnt"

    model = models.build_model("convnet").eval()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    images, labels = data.load_tensors("synthetic", str(short_dir))[1].tensors
    with torch.no_grad():
        logits = model(images)
    assert accuracy == int((logits.argmax(1) == labels).sum()) / 5
    assert loss == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-4)
    more = ["checkpoint.pt", "runs"] if script == "ddp_complete" else []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model.pt", *more])


def test_accumulated_batches_of_three_ranks_make_the_weights_of_one_batch(short_dir, tmp_path):
    """In float64 and without batch normalisation."""
    weights = []
    for ranks, accumulate in ((1, 1), (3, 2)):
        flags = ["--batch-size", 96 // ranks // accumulate, "--grad-accum-steps", accumulate]
        flags += ["--data-dir", short_dir]
        folder = tmp_path / str(ranks)
        result(train("ddp_complete", ranks, folder, *flags, ALTER="exact"))
        weights.append(torch.load(folder / "model.pt"))
    assert weights[0]["1.weight"].dtype == torch.float64
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


# ddp_complete.py: a run that is stopped, killed, continued

STEP = 96
RESTART = {"PET_MAX_RESTARTS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_ctrl_c_stops_all_ranks_after_a_step(short_dir, tmp_path):
    """And no loader worker, although torchrun passes it on to the process groups of the ranks."""
    flag = tmp_path / "flag"
    words = [*STANDALONE, 2, ALTERED, "scripts/minimal/ddp_complete.py", "--num-workers", 1]
    words += ["--dataset", "synthetic", "--data-dir", short_dir, "--batch-size", 48]
    how = {"ALTER": "wait", "ALTER_AT": "loss 4", "ALTER_FLAG": str(flag)}
    process = start(*words, cwd=tmp_path, **how)
    wait_until(flag.exists, TIMEOUT)
    os.kill(process.pid, signal.SIGINT)
    ended = finish(process, TIMEOUT)
    assert ended.returncode == 1, ended.text
    assert "DataLoader worker" not in ended.stderr
    assert ended.stdout.count(f"stopped: the next start goes on after {11 * STEP} images\n") == 1


@pytest.mark.slow
def test_a_killed_run_ends_as_if_undisturbed_and_takes_more_epochs(short_dir, tmp_path):
    """From three ranks on the order in which they are added up decides the last bits of a sum."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"

    def complete(folder, epochs, *more, ranks=3, **variables):
        flags = ["--data-dir", short_dir, "--batch-size", 32, "--num-workers", 1]
        flags += ["--epochs", epochs, *more]
        return train("ddp_complete", ranks, folder, *flags, **variables)

    result(complete(calm, 2))
    how = {"ALTER": "SIGKILL", "ALTER_RANK": "2", "ALTER_FLAG": str(tmp_path / "flag")}
    how |= {"ALTER_AT": "loss 25", "ALTER_ONCE": ""}  # the second epoch's fourth step
    result(complete(killed, 2, **how, **RESTART))
    for name in ("model.pt", "checkpoint.pt"):
        found, expected = (torch.load(each / name) for each in (killed, calm))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    curve = EventAccumulator(str(killed / "runs")).Reload().Scalars("accuracy/test")
    assert [event.step for event in curve] == [IMAGES, 2 * IMAGES]

    path = killed / "checkpoint.pt"
    more = complete(killed, 3, "--amp", "bf16", "--weight-decay", 0.1, ranks=2)
    assert result(more)[1] > 90
    assert [epoch for epoch, *_ in RESULT.findall(more.stdout)] == ["3"]
    assert torch.load(path)["optimizer"]["param_groups"][0]["weight_decay"] == 0.1

    good = path.read_bytes()
    broken = complete(killed, 4, "--max-grad-norm", "nan")
    assert broken.returncode == 1
    assert "the loss or a weight is not finite: nothing was saved\n" in broken.stderr
    assert path.read_bytes() == good


def test_what_cannot_go_on_is_one_line_with_its_reason(short_dir, tmp_path):
    def refusal(**variables):
        words = [FOLDER / "ddp_complete.py", "--dataset", "synthetic", "--data-dir", short_dir]
        variables |= {**ALONE, "MASTER_PORT": str(free_port())}
        return error_line(run(sys.executable, *words, cwd=tmp_path, **variables), status=1)

    path = tmp_path / "checkpoint.pt"
    torch.save({"position": 0, "model": models.build_model("mlp").state_dict()}, path)
    content = path.read_bytes()
    assert re.match("move checkpoint.pt away to start over: RuntimeError: Error.* key", refusal())
    assert path.read_bytes() == content
    line = refusal(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_MAX_RESTARTS="3")
    assert line.startswith("--max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and ")


# What each step did


# Runs a minimal script with another model, and notes what each rank does. A stop comes as a signal.
WATCHED = """
import json, os, runpy, signal, sys
root, script, folder, model, stop, count = sys.argv[1:7]
sys.argv[:7] = [script]
sys.path.insert(0, root)
import torch
import torch.nn.functional as F
import data, models

rank = int(os.environ.get("RANK", 0))
told = open(f"{folder}/rank{rank}.jsonl", "a")
wrapped, read, steps = [], [], 0
build, load, loss = models.build_model, data.load_tensors, F.cross_entropy
clip, step = torch.nn.utils.clip_grad_norm_, torch.optim.SGD.step
make, propagate = torch.nn.parallel.DistributedDataParallel.__init__, torch.Tensor.backward

class Watched(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        read.append(int(index))
        return super().__getitem__(index)

def tell(**facts):
    print(json.dumps(facts), file=told, flush=True)

def build_model(name, *rest):
    return build(model, *rest)

def wrap(self, *args, **how):
    make(self, *args, **how)
    wrapped.append(self)

def cross_entropy(logits, labels, **how):
    global steps
    if not how:
        steps += 1
        tell(images=read[-len(labels):])
        if steps == int(stop):
            os.kill(os.getpid(), (signal.SIGTERM, signal.SIGINT)[rank])
    return loss(logits, labels, **how)

def backward(loss, *args):
    sends = [model.require_backward_grad_sync for model in wrapped]
    tell(sends=sends, seed=torch.initial_seed())
    return propagate(loss, *args)

def clip_grad_norm_(*args):
    norm = clip(*args)
    tell(norm=float(norm))
    return norm

def sgd_step(self, *args):
    tell(lr=self.param_groups[0]["lr"])
    return step(self, *args)

models.build_model, F.cross_entropy = build_model, cross_entropy
def load_tensors(*where):
    train_set, test_set = load(*where)
    return Watched(*(tensor[: int(count)] for tensor in train_set.tensors)), test_set

data.load_tensors = load_tensors
torch.nn.utils.clip_grad_norm_, torch.optim.SGD.step = clip_grad_norm_, sgd_step
torch.nn.parallel.DistributedDataParallel.__init__, torch.Tensor.backward = wrap, backward
runpy.run_path(script, run_name="__main__")
"""


def watch(script, ranks, folder, data_dir, *flags, model="mlp", stop=0, count=IMAGES):
    """Train, and return what was printed, and what each rank did since the folder was made."""
    folder.mkdir(exist_ok=True)
    (folder / "watched.py").write_text(WATCHED)
    launcher = [sys.executable] if ranks == 1 else [*STANDALONE, ranks]
    where = [ROOT, FOLDER / f"{script}.py", folder, model, stop, count]
    data_flags = ["--dataset", "synthetic", "--data-dir", data_dir]
    command = [*launcher, folder / "watched.py", *where, *data_flags, *flags]
    alone = ALONE | {"MASTER_PORT": str(free_port())} if ranks == 1 else {}
    ended = run(*command, cwd=folder, timeout=TIMEOUT, **alone)
    assert ended.returncode == 0, ended.text
    found = []
    for rank in range(ranks):
        lines = (folder / f"rank{rank}.jsonl").read_text().splitlines()
        found.append([json.loads(line) for line in lines])
    return ended, found


def facts(rank, name):
    return [line[name] for line in rank if name in line]


@pytest.mark.parametrize(
    ("script", "ranks", "batch", "expected"),
    [("single", 1, 960, 0.12), ("dp", 1, 192, 0.06), ("ddp", 2, 96, 0.06)],  # at most 4 x 0.03
)
def test_the_rate_follows_the_global_batch(script, ranks, batch, expected, short_dir, tmp_path):
    """And ranks draw other numbers."""
    flags = ["--batch-size", batch]
    _, found = watch(script, ranks, tmp_path, short_dir, *flags, model="linear")
    assert len({facts(rank, "seed")[0] for rank in found}) == ranks, "equal random numbers"
    for rank in found:
        assert facts(rank, "lr") == [pytest.approx(expected)] * (IMAGES // (batch * ranks))


def test_a_stop_between_micro_steps_and_another_number_of_ranks(short_dir, tmp_path):
    """Each image is used once in the epoch, by two ranks before the stop and by one after it."""
    flags = ["--grad-accum-steps", 2, "--batch-size"]
    ended, found = watch("ddp_complete", 2, tmp_path, short_dir, *flags, 24, stop=3)
    assert f"stopped: the next start goes on after {11 * STEP} images\n" in ended.stdout
    seeds = [seed for rank in found for seed in facts(rank, "seed")]
    assert len({*seeds}) == len(seeds) == 2 * 22, "other random numbers for each rank and batch"
    assert facts(found[0], "sends") == [[False], [True]] * 11
    used = [image for rank in found for batch in facts(rank, "images") for image in batch]
    (tmp_path / "rank0.jsonl").unlink()
    ended, found = watch("ddp_complete", 1, tmp_path, short_dir, *flags, 48)
    result(ended)
    used += [image for batch in facts(found[0], "images") for image in batch]
    assert sorted(used) == [*range(IMAGES)]


def test_gradients_are_sent_once_a_step_and_ranks_draw_other_numbers(short_dir, tmp_path):
    """By the long script; the test above shows it of the complete one."""
    flags = ["--max-steps", 2, "--grad-accum-steps", 2, "--run-dir", tmp_path / "run"]
    _, found = watch("../../train_ddp", 2, tmp_path, short_dir, *flags)
    assert len({facts(rank, "seed")[-1] for rank in found}) == 2
    for rank in found:  # after the pass before the training
        assert facts(rank, "sends")[-4:] == [[False], [True]] * 2


def test_gradients_are_clipped_by_their_true_size_in_fp16(short_dir, tmp_path):
    """The loss is scaled up by 65,536. And the rates rise and fall, in two epochs of two steps."""
    flags = ["--amp", "fp16", "--batch-size", 960, "--epochs", 2]
    _, (rank,) = watch("ddp_complete", 1, tmp_path, short_dir, *flags, model="linear")
    assert 0 < max(facts(rank, "norm")) < 100
    shares = [0.125 / 0.3, 0.625 / 0.7, 0.375 / 0.7, 0.125 / 0.7]
    assert facts(rank, "lr") == pytest.approx([0.4 * share for share in shares])
    orders = facts(rank, "images")
    assert orders[:2] != orders[2:], "each epoch has the order of the first"


def test_a_resumed_run_draws_the_dropout_of_one_that_was_never_stopped(short_dir, tmp_path):
    how = {"model": "basic", "count": 4 * STEP}
    watch("ddp_complete", 1, tmp_path / "calm", short_dir, **how)
    ended, _ = watch("ddp_complete", 1, tmp_path / "stopped", short_dir, **how, stop=1)
    assert f"stopped: the next start goes on after {STEP} images\n" in ended.stdout
    watch("ddp_complete", 1, tmp_path / "stopped", short_dir, **how)
    weights = [torch.load(tmp_path / name / "model.pt") for name in ("calm", "stopped")]
    assert models.build_model("basic").state_dict().keys() == weights[0].keys()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


# Ends as soon as torch is imported, and prints what torch would find.
FIRST_IMPORT = """
import os, runpy, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.exit(os.environ.get("TORCH_DIST_USE_NCCL2"))
sys.meta_path.insert(0, Finder())
runpy.run_path(sys.argv[1], run_name="imported")
"""


def test_the_nccl_class_that_sends_during_the_backward_is_chosen_before_torch_is_there():
    """A user's own setting wins."""
    variable, names = "TORCH_DIST_USE_NCCL2", ("ddp", "ddp_complete", "fsdp")
    scripts = ["train_ddp.py", *(f"scripts/minimal/{name}.py" for name in names)]
    for script, given in (*((each, "") for each in scripts), ("train_ddp.py", "1")):
        chosen = [f"{variable}={given}"] if given else []
        words = ["env", "-u", variable, *chosen, sys.executable, "-c", FIRST_IMPORT, ROOT / script]
        assert run(*words, real=True).stderr == f"{given or 0}\n", script
