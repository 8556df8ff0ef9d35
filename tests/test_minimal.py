"""The minimal scripts train as well and evaluate as exactly as the long ones."""

import ast
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import models
from tests.minimal import FOLDER, RESULT, TIMEOUT, begin, result, train
from tests.processes import (
    ALTERED,
    ROOT,
    STANDALONE,
    error_line,
    finish,
    free_port,
    marked,
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


@pytest.mark.parametrize(
    ("script", "variables"), [("ddp", {}), ("fsdp", {}), ("ddp_complete", {"RANK": "0"})]
)
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
        pytest.param("dp", 0, 1, marks=pytest.mark.slow),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [("single 1", "dp 1"), ("ddp 1", "ddp 3"), ("ddp_complete 1 1", "ddp_complete 3 4")],
)
def test_the_same_global_batch_makes_the_same_weights(one, other, short_dir, tmp_path):
    """In float64 and without batch normalisation.

    Each pair has an order of its own: ``RandomSampler`` draws it from the default generator,
    ``DistributedSampler`` from one that is seeded by seed + epoch.
    """
    weights = []
    for layout in (one, other):
        script, ranks, *accumulate = layout.split()
        batch = 96 // int(ranks) // int([*accumulate, 1][0])
        flags = ["--data-dir", short_dir, "--batch-size", batch, "--epochs", 2]
        flags += [f"--grad-accum-steps={number}" for number in accumulate]
        result(train(script, int(ranks), tmp_path / layout, *flags, ALTER="exact"))
        weights.append(torch.load(tmp_path / layout / "model.pt"))
    assert weights[0].keys() == models.mlp().state_dict().keys()
    assert weights[0]["1.weight"].dtype == torch.float64
    torch.testing.assert_close(*weights, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_command_shown_reaches_98_percent(mnist_dir, tmp_path):
    """One epoch of MNIST."""
    command, _ = shell_line(docstring_command("ddp_complete", 0, mnist_dir))
    ended = run(*command, cwd=tmp_path, timeout=240)
    assert result(ended, 10_000)[1] > 98


@pytest.mark.slow
def test_two_torchruns_on_one_host(short_dir, tmp_path):
    """The command of ddp.py's docstring, twice."""
    line = docstring_command("ddp", 2, short_dir) + " --dataset synthetic"
    assert line.startswith("torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d ")
    port = {"HOST0": "127.0.0.1", "PORT": str(free_port())}
    command, variables = shell_line(line.replace("29500", "$PORT"), **port)
    both = [start(*command, "--batch-size", 24, cwd=tmp_path, **variables) for _ in range(2)]
    ended = [finish(process, TIMEOUT) for process in both]
    assert [one.returncode for one in ended] == [0, 0], [one.text for one in ended]
    assert sum(bool(RESULT.search(one.stdout)) for one in ended) == 1, "only rank 0 reports"


# ddp_complete.py: a run that is stopped, killed, continued

EPOCHS, STEP = 2, 96
MOMENT = {"ALTER_RANK": "2", "ALTER_AT": "loss 25", "ALTER_ONCE": ""}  # the second epoch's 4th step
RESTART = {"PET_MAX_RESTARTS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# From three ranks on the order in which they are added up decides the last bits of a sum.
RANKS, COMPLETE_FLAGS = 3, ["--batch-size", 32, "--num-workers", 1]


def complete(folder, data_dir, *flags, ranks=RANKS):
    return train("ddp_complete", ranks, folder, "--data-dir", data_dir, *COMPLETE_FLAGS, *flags)


@pytest.fixture(scope="module")
def undisturbed(short_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    result(complete(folder, short_dir, "--epochs", EPOCHS))
    return folder


def assert_equals(folder, undisturbed):
    for name in ("model.pt", "checkpoint.pt"):
        found, expected = (torch.load(each / name) for each in (folder, undisturbed))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    curve = EventAccumulator(str(folder / "runs")).Reload().Scalars("accuracy/test")
    assert [event.step for event in curve] == [IMAGES * (n + 1) for n in range(EPOCHS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "restarts"),
    [("SIGTERM", 0, 1), ("wait", 1, 0), ("SIGKILL", 0, 1)],  # torchrun gets SIGINT where they wait
)
def test_an_interrupted_run_ends_with_the_weights_of_an_undisturbed_one(
    how, status, restarts, undisturbed, short_dir, tmp_path
):
    """Only a kill repeats the epoch from its beginning."""
    flags, flag = ["--data-dir", short_dir, *COMPLETE_FLAGS, "--epochs", EPOCHS], tmp_path / "flag"
    variables = MOMENT | {"ALTER": how, "ALTER_FLAG": str(flag)} | (RESTART if restarts else {})
    process = begin("ddp_complete", RANKS, tmp_path, *flags, **variables)
    if how == "wait":
        wait_until(flag.exists, TIMEOUT)
        os.kill(process.pid, signal.SIGINT)
    ended = finish(process, TIMEOUT)
    assert ended.returncode == status, ended.text
    assert "DataLoader worker" not in ended.stderr
    told = "stopped: the next start goes on after {} images\n"
    # The ranks agree on a stop after the first and the eleventh step.
    position = IMAGES if how == "SIGKILL" else IMAGES + 11 * STEP
    assert ended.stdout.count(told.format(position)) == (how != "SIGKILL"), ended.text
    if status or how != "SIGKILL":
        assert torch.load(tmp_path / "checkpoint.pt")["position"] == position
        ended = complete(tmp_path, short_dir, "--epochs", EPOCHS)
        assert f"{position / IMAGES:.2f} epochs are done, and --epochs is {EPOCHS}" in ended.stdout
    result(ended)
    assert_equals(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv of util-linux")
def test_no_process_trains_on_when_torchrun_is_killed(undisturbed, short_dir, tmp_path):
    """The last command of the docstring."""
    line = docstring_command("ddp_complete", 3, short_dir)
    assert "setpriv --pdeathsig TERM python" in line
    line = line.replace("TERM python", f"TERM python {ALTERED}").replace("node 2", f"node {RANKS}")
    flags = " ".join(map(str, COMPLETE_FLAGS))
    command, _ = shell_line(f"{line} --dataset synthetic {flags} --epochs {EPOCHS}")
    flag = tmp_path / "flag"
    process = start(*command, cwd=tmp_path, **MOMENT, ALTER="wait", ALTER_FLAG=str(flag))
    wait_until(flag.exists, TIMEOUT)
    os.kill(process.pid, signal.SIGKILL)
    assert "stopped: the next start goes on after " in finish(process, TIMEOUT).stdout
    wait_until(lambda: not marked(), TIMEOUT)
    result(complete(tmp_path, short_dir, "--epochs", EPOCHS))
    assert_equals(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_complete_run_takes_more_epochs_and_keeps_a_good_checkpoint(
    undisturbed, short_dir, tmp_path
):
    folder = shutil.copytree(undisturbed, tmp_path / "copy")
    path = folder / "checkpoint.pt"
    again = complete(folder, short_dir, "--epochs", EPOCHS - 1)
    assert (again.returncode, RESULT.findall(again.stdout)) == (0, [])
    assert f"{EPOCHS}.00 epochs are done, and --epochs is {EPOCHS - 1}" in again.stdout

    (folder / "checkpoint.pt.tmp").write_bytes(path.read_bytes()[:1000])  # of a killed process
    flags = ["--epochs", EPOCHS + 1, "--amp", "bf16", "--grad-accum-steps", 2]
    more = complete(folder, short_dir, *flags, "--weight-decay", 0.1, ranks=2)
    assert result(more)[1] > 90
    assert [epoch for epoch, *_ in RESULT.findall(more.stdout)] == [str(EPOCHS + 1)]
    assert not (folder / "checkpoint.pt.tmp").exists()
    assert torch.load(path)["optimizer"]["param_groups"][0]["weight_decay"] == 0.1

    good = path.read_bytes()
    for batch in (32, 160):  # the loss of a step shows it, or in so short an epoch only the weights
        flags = ["--epochs", EPOCHS + 2, "--max-grad-norm", "nan", "--batch-size", batch]
        broken = complete(folder, short_dir, *flags)
        assert broken.returncode == 1
        assert "the loss or a weight is not finite: nothing was saved\n" in broken.stderr
        assert path.read_bytes() == good


def test_what_cannot_go_on_is_one_line_with_its_reason(short_dir, tmp_path):
    def refusal(**variables):
        flags = ["--dataset", "synthetic", "--data-dir", short_dir]
        script = FOLDER / "ddp_complete.py"
        variables |= {**ALONE, "MASTER_PORT": str(free_port())}
        return error_line(run(sys.executable, script, *flags, cwd=tmp_path, **variables), status=1)

    path = tmp_path / "checkpoint.pt"
    model = models.build_model("convnet").state_dict()
    torch.save({"position": 0, "model": model | {"classifier.bias": torch.zeros(11)}}, path)
    for content, reason in (
        (path.read_bytes(), "size mismatch for classifier.bias: copying a param with shape"),
        (path.read_bytes()[:-1000], "RuntimeError: PytorchStreamReader failed reading zip archive"),
    ):
        path.write_bytes(content)
        line = refusal()
        assert line.startswith("move checkpoint.pt away to start over: ")
        assert reason in line
        assert path.read_bytes() == content
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    line = refusal(**shared)
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
networks, wrapped, read, steps = [], [], [], 0
build, load, loss = models.build_model, data.load_tensors, F.cross_entropy
clip, step = torch.nn.utils.clip_grad_norm_, torch.optim.SGD.step
make, propagate = torch.nn.parallel.DistributedDataParallel.__init__, torch.Tensor.backward

class Watched(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        read.append(int(index))
        return super().__getitem__(index)

def tell(**facts):
    print(json.dumps(facts), file=told, flush=True)

def count_forward(network, inputs):
    network.part.add_(rank)

def build_model(name, *rest):
    network = build(model.removesuffix(" part"), *rest)
    if model.endswith(" part"):  # a buffer that is every second column, and differs on each rank
        network.register_buffer("part", torch.zeros(2, 4)[:, ::2])
        network.register_forward_pre_hook(count_forward)
        networks.append(network)
    return network

def wrap(self, *args, **how):
    make(self, *args, **how)
    wrapped.append(self)

def cross_entropy(logits, labels, **how):
    global steps
    if not how:
        steps += 1
        tell(images=read[-len(labels):])
        if steps == int(stop):
            os.kill(os.getpid(), signal.SIGTERM)
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
for network in networks:
    tell(part=network.part.tolist())
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
    """And ranks draw other numbers, and a buffer that is part of a tensor becomes that of rank 0.

    Where its memory is not contiguous, gloo would send other numbers, and NCCL refuse.
    """
    flags = ["--batch-size", batch]
    _, found = watch(script, ranks, tmp_path, short_dir, *flags, model="linear part")
    assert len({facts(rank, "seed")[0] for rank in found}) == ranks, "equal random numbers"
    for number, rank in enumerate(found):
        assert facts(rank, "lr") == [pytest.approx(expected)] * (IMAGES // (batch * ranks))
        # After the broadcast the hook has run once more, in the one batch of the evaluation.
        assert facts(rank, "part") == [[[number] * 2] * 2]


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
    """The loss is scaled up by 65,536. The rates are those of a quarter and three quarters."""
    flags = ["--amp", "fp16", "--batch-size", 960]
    _, (rank,) = watch("ddp_complete", 1, tmp_path, short_dir, *flags, model="linear")
    assert 0 < max(facts(rank, "norm")) < 100
    assert facts(rank, "lr") == pytest.approx([0.4 * 0.25 / 0.3, 0.4 * 0.25 / 0.7])


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
# The class that torch 2.15 makes, as init_process_group chooses it: it has two.
CREATOR = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="imported")
from torch.distributed import distributed_c10d
if hasattr(distributed_c10d, "_create_nccl2_process_group"):
    distributed_c10d._register_builtin_nccl_backend()
    print(distributed_c10d.Backend._plugins["NCCL"].creator_fn.__name__)
"""


def without_torch(code, script, given=""):
    """Run code in a process that has no torch yet."""
    name = "TORCH_DIST_USE_NCCL2"
    words = ["env", "-u", name, *([f"{name}={given}"] if given else []), sys.executable, "-c"]
    return run(*words, code, ROOT / script, real=True)


def test_the_nccl_class_that_sends_during_the_backward_is_chosen_before_torch_is_there():
    """A user's own setting wins."""
    for name in ("ddp", "ddp_complete", "fsdp"):
        assert without_torch(FIRST_IMPORT, f"scripts/minimal/{name}.py").stderr == "0\n", name
    for given in ("", "1"):
        found = without_torch(FIRST_IMPORT, "train_ddp.py", given).stderr
        assert found == f"{given or 0}\n"


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.15", reason="needs a torch that has two classes")
@pytest.mark.parametrize(("given", "creator"), [("", "nccl"), ("1", "nccl2")])
def test_the_variable_chooses_the_nccl_class(given, creator):
    told = without_torch(CREATOR, "train_ddp.py", given).stdout
    assert told == f"_create_{creator}_process_group\n"
