"""Draw the pictures of these pages that show measurements or figures, and measure first.

python docs/pictures.py how_ddp_works.svg
python docs/pictures.py step_timeline.svg        # wants a quiet machine, as the next ones do
python docs/pictures.py sending_gradients.svg    # wants root and iproute2: a link of 1 Gb/s
python docs/pictures.py memory_of_a_step.svg     # wants two GPUs
python docs/pictures.py memory.svg
python docs/pictures.py large_batch.svg          # 144 runs with MNIST: hours on two quiet cores
python docs/pictures.py faster.svg               # wants root and iproute2: links of 0.03 to 1 Gb/s
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / folder) for folder in ("", "scripts/lessons", "scripts/tools")]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models

BLUE, ORANGE, GREEN, RED, GREY = "#6ea3f5", "#f0a35e", "#63bd7a", "#e8716b", "#a8adb3"
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #24292f } .title { font-weight: 600 } "
    ".note { fill: #59636e } .inside { fill: #101418; font-size: 11px } "
    "line, polyline, .frame { stroke: #8c959f; fill: none } @media (prefers-color-scheme: dark) "
    "{ text { fill: #e6edf3 } .note { fill: #9198a1 } }"
)
PORT, ADDRESSES = 29533, ("10.77.0.1", "10.77.0.2")


class Picture:
    """An SVG file of 900 pixels' width."""

    def __init__(self, height: int, title: str, description: str) -> None:
        self.size = f'viewBox="0 0 900 {height}" width="900"'
        self.shapes = [f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"]

    def box(
        self, x: float, y: float, width: float, fill: str, words: str = "", height: int = 20
    ) -> None:
        """Draw a box, with words if they fit. Without a colour it is a frame."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(1, width):.1f}" height="{height}"'
        look = f'fill="{fill}"' if fill else 'class="frame"'
        self.shapes.append(f"<rect {place} {look}/>")
        if words and 6 * len(words) < width:
            self.text(x + width / 2, y + 14, words, "inside", "middle")

    def text(self, x: float, y: float, words: str, look: str = "note", at: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{at}"'
        self.shapes.append(f'<text {place} class="{look}">{escape(words)}</text>')

    def line(self, *points: tuple[float, float], stroke: str = "", dash: str = "") -> None:
        look = f' style="stroke: {stroke}; stroke-width: 2"' if stroke else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polyline points="{path}" stroke-dasharray="{dash}"{look}/>')

    def legend(self, names: dict[str, str], step: int) -> None:
        for i, (words, fill) in enumerate(names.items()):
            self.box(60 + i * step, 6, 12, fill, height=12)
            self.text(77 + i * step, 16, words)

    def save(self, name: str) -> None:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} role="img">'
        shapes = "".join(self.shapes)
        (DOCS / name).write_text(f"{head}\n<style>{STYLE}</style>\n{shapes}\n</svg>\n")


def run_over_link(rate: str, *command: str) -> str:
    """Run a command as two ranks in two network namespaces with a link of ``rate`` between them.

    Return rank 0's output.
    """
    names = [f"picture{os.getpid()}-{rank}" for rank in range(2)]

    def shell(line: str) -> None:
        subprocess.run(line.split(), check=True)

    with ExitStack() as stack:
        for name in names:
            shell(f"ip netns add {name}")
            stack.callback(shell, f"ip netns delete {name}")
        shell(f"ip -n {names[0]} link add link0 type veth peer name link1 netns {names[1]}")
        for rank, name in enumerate(names):
            shell(f"ip -n {name} address add {ADDRESSES[rank]}/24 dev link{rank}")
            shell(f"ip -n {name} link set lo up")
            shell(f"ip -n {name} link set link{rank} up")
            limit = f"tbf rate {rate} burst 70kb latency 50ms"
            shell(f"tc -n {name} qdisc add dev link{rank} root {limit}")
        processes = []
        for rank, name in enumerate(names):
            meet = f"MASTER_ADDR={ADDRESSES[0]} MASTER_PORT={PORT} WORLD_SIZE=2 RANK={rank}"
            own = f"LOCAL_RANK=0 GLOO_SOCKET_IFNAME=link{rank} OMP_NUM_THREADS=1"
            words = f"ip netns exec {name} env {meet} {own} {sys.executable}".split()
            pipe = subprocess.Popen([*words, *command], stdout=subprocess.PIPE, text=True)
            processes.append(pipe)
        told = [process.communicate(timeout=400)[0] for process in processes]
        return told[0]


# How DDP works


def draw_how_ddp_works(name: str) -> None:
    import bucket_overlap
    from _lesson import context, values

    context.set_forkserver_preload(["torch._dynamo"])
    events, sizes = values(bucket_overlap.work, 2, {"bucket_cap_mb": 2.0})[0][1]
    layers = (event for event in events if event.startswith("layer"))
    picture = Picture(
        *(250, "How DDP sends gradients during the backward"),
        "A model of three layers. A hook on each parameter counts the bucket's ready gradients. "
        "A full bucket goes to the process group, which averages it beside the backward.",
    )
    rows = ("backward", "hook of the weight", "DDP's reducer", "process group", "thread or stream")
    tops = [24 + 42 * i for i in range(len(rows))]
    for words, y in zip(rows, tops, strict=True):
        picture.text(138, y + 14, words, "title", "end")
    width, x, end = 150, 150.0, 0.0
    for number, size in enumerate(sizes):
        count = size // bucket_overlap.LAYER_BYTES
        for ready in range(1, count + 1):
            words = f"bucket {number}: {ready} of {count} ready"
            picture.box(x, tops[0], width - 6, ORANGE, f"gradient of {next(layers)}")
            picture.box(x + width - 40, tops[1], 60, GREY, "called")
            picture.box(x + width - 40, tops[2], width - 6, GREY, words)
            for y in tops[:-1] if ready == count else tops[:2]:
                picture.line((x + width - 10, y + 20), (x + width - 10, y + 42))
            x += width
        picture.box(x - 40, tops[3], width - 6, RED, f"all_reduce, {size / 1e6:.2f} MB")
        begin, length = max(end, x - 40), 0.95 * width * size / max(sizes)
        picture.box(begin, tops[4], length, RED, f"bucket {number}")
        end = begin + length + 6
    picture.box(x, tops[0], end - x, "", "waits")
    picture.box(end + 8, tops[0], 110, GREEN, "optimizer.step()")
    picture.line((end, tops[4]), (end, 44), dash="3 3")
    words = "Time goes from left to right. While bucket 0 is sent, the backward goes on."
    picture.text(150, 236, words)
    picture.save(name)


# One step of each script


def draw_step_timeline(name: str) -> None:
    import trace as tool

    flags = {"train_single.py": ["64"], "train_dp.py": ["32", "--replicas", "2"]}
    flags["train_ddp.py"] = ["32", "--nprocs", "2"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        where = ["--dataset", "synthetic", "--data-dir", f"{folder}/data", "--no-tensorboard"]
        for script, more in flags.items():
            command = [sys.executable, str(DOCS.parent / script), *where, "--model", "basic"]
            command += ["--max-steps", "20", "--profile", "--run-dir", f"{folder}/{script}"]
            subprocess.run([*command, "--batch-size", *more], check=True)
            found[script] = tool.read_trace(Path(folder, script, "profile", "rank0.json.gz"))
    steps = {script: [min(t.steps, key=lambda s: s[1] - s[0])] for script, t in found.items()}
    scale = 740 / max(map(tool.length, steps.values()))
    picture = Picture(
        *(260, "One optimizer step of the three scripts, to one scale"),
        "The model basic, 64 images in all, two cores. The fastest of ten steps, of rank 0.",
    )
    colours = {"data": GREY, "forward": BLUE, "backward": ORANGE, "optimizer": GREEN}
    picture.legend(colours | {"copies, collectives, waiting for them": RED}, 110)
    for i, (script, trace) in enumerate(found.items()):
        y, step = 46 + 72 * i, steps[script]
        picture.text(140, y, f"{script}, {tool.length(step) / 1e3:.1f} ms", "title")
        rows = [(y + 6, colours[phase], phase, spans) for phase, spans in trace.busy.items()]
        rows += [(y + 28, RED, part.replace("_", " "), s) for part, s in trace.parts.items()]
        picture.text(128, y + 20, "computes", "note", "end")
        picture.text(128, y + 42, "sends or waits", "note", "end")
        for top, fill, words, spans in rows:
            for begin, end in tool.intersect(tool.union(spans), step):
                x = 140 + scale * (begin - step[0][0])
                picture.box(x, top, scale * (end - begin), fill, words)
    picture.save(name)


# Three ways to send gradients


WAYS = {  # and the MiB at which DDP closes a bucket
    "all gradients after the backward": 1000.0,
    "each gradient from its hook": 1e-6,
    "buckets from their hooks: DDP": None,
}


def send_three_ways() -> None:
    """Be a rank: time three ways to send; rank 0 prints the fastest step of each as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    sends: list[tuple[float, float, int]] = []
    computed: list[float] = []  # when the loss was there, and then each gradient

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start an all-reduce, and note when it begins and ends."""
        begin, values = time.perf_counter(), bucket.buffer()
        future = dist.all_reduce(values, async_op=True).get_future()

        def ended(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            sends.append((begin, time.perf_counter(), values.nbytes))
            return done.value()[0].div_(2)

        return future.then(ended)

    def build(bucket_cap_mb: float | None) -> nn.Module:
        raw_model = models.build_model("resnet18")
        for p in raw_model.parameters():
            p.register_hook(lambda gradient: computed.append(time.perf_counter()))
        model = DistributedDataParallel(raw_model, bucket_cap_mb=bucket_cap_mb)
        model.register_comm_hook(None, send)
        return model

    ways = {way: build(bucket_cap_mb) for way, bucket_cap_mb in WAYS.items()}
    found: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(30):
        for way, model in ways.items():
            model.zero_grad()
            sends.clear()
            computed.clear()
            dist.barrier()
            begin = time.perf_counter()
            loss = F.cross_entropy(model(images), labels)
            computed.append(time.perf_counter())
            loss.backward()
            end = time.perf_counter()
            moved = [(a - begin, b - begin, size) for a, b, size in sends]
            found[way].append([end - begin, computed[0] - begin, computed[-1] - begin, moved])
    for steps in found.values():
        steps[:] = min(steps[3:])  # the one that other programs disturbed least
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def draw_sending_gradients(name: str) -> None:
    from trace import intersect, length, union

    found = json.loads(run_over_link("1gbit", __file__, "rank").splitlines()[-1])
    picture = Picture(
        *(246, "One step of two ranks, with three ways to send the gradients"),
        "ResNet-18, 64 images on each of two ranks, a CPU core each, a link of 1 Gb/s.",
    )
    picture.legend({"forward": BLUE, "backward": ORANGE, "all-reduce": RED}, 100)
    scale = 820 / max(step[0] for step in found.values())
    for i, (way, (end, computed, done, sends)) in enumerate(found.items()):
        y, busy = 36 + 68 * i, union([(begin, stop) for begin, stop, _ in sends])
        calls, size = len(sends), sum(send[2] for send in sends) / 1e6
        words = f"{way}: {calls} call{'s' * (calls > 1)}, {size:.1f} MB"
        hidden = length(intersect(busy, [(0.0, done)])) / length(busy)
        told = f"step {1e3 * end:.0f} ms; sending {1e3 * length(busy):.0f} ms, {hidden:.0%} hidden"
        picture.text(60, y, words, "title")
        picture.text(880, y, told, "note", "end")
        picture.box(60, y + 6, scale * computed, BLUE, "forward")
        picture.box(60 + scale * computed, y + 6, scale * (done - computed), ORANGE, "backward")
        picture.box(60 + scale * done, y + 6, scale * (end - done), "", "waits")
        for begin, stop, _ in sends:
            picture.box(60 + scale * begin, y + 28, scale * (stop - begin), RED, height=14)
    for tick in range(0, int(1e3 * 820 / scale) + 1, 200):
        picture.text(60 + scale * tick / 1e3, 240, f"{tick} ms", "note", "middle")
    picture.save(name)


# Memory over a step


def bytes_over_a_step(technique: str) -> list[list[list[int]]]:
    """Return for each device, for each phase of a step, its bytes after each change."""
    raw_model = models.build_model("resnet18").to("cuda:0")
    model: nn.Module = nn.DataParallel(raw_model, [0, 1])
    if technique == "ddp":
        model = DistributedDataParallel(raw_model, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1, momentum=0.9)
    batch = 64 if technique == "ddp" else 128
    memory: Any = torch.cuda.memory
    signs = {"alloc": 1, "free_completed": -1}
    curves: list[list[list[int]]] = []

    def end_phase() -> None:
        """Add the phase that ends to the curves, and record the next one."""
        for phases, events in zip(curves, memory._snapshot()["device_traces"], strict=False):
            changes = [signs.get(e["action"], 0) * e["size"] for e in events]
            phases.append([*accumulate(changes, initial=phases[-1][-1])])
        memory._record_memory_history(max_entries=10**6, context=None, clear_history=True)

    for _ in range(4):
        curves[:] = [[[torch.cuda.memory_allocated(device)]] for device in range(2)]
        images = torch.randn(batch, 1, 28, 28).to("cuda:0")
        labels = torch.randint(10, (batch,)).to("cuda:0")
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels)
        del outputs
        end_phase()
        loss.backward()
        end_phase()
        optimizer.step()
        optimizer.zero_grad()
        del images, labels, loss
        end_phase()
    memory._record_memory_history(enabled=None)
    return [phases[1:] for phases in curves]


def draw_memory_of_a_step(name: str) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    curves = [*bytes_over_a_step("dp"), bytes_over_a_step("ddp")[0]]
    dist.destroy_process_group()
    picture = Picture(
        *(330, "Memory over one step: the two devices of DP, and a device of DDP"),
        "ResNet-18, 64 images on each device, SGD with momentum. What torch's allocator counts.",
    )
    colours = {"DP, first device": ORANGE, "DP, second device": GREY, "DDP, each device": BLUE}
    picture.legend(colours, 210)
    phases = {"forward and loss": (60, 320), "backward": (320, 700), "optimizer": (700, 840)}
    top = max(size for parts in curves for part in parts for size in part) / 1e6
    for tick in range(0, int(top) + 40, 40):
        y = 300 - 250 * tick / top
        picture.line((60, y), (840, y), dash="1 3")
        picture.text(52, y + 4, f"{tick} MB", "note", "end")
    for words, (begin, end) in phases.items():
        picture.text((begin + end) / 2, 322, words, "title", "middle")
        picture.line((end, 40), (end, 300))
    for (words, stroke), parts in zip(colours.items(), curves, strict=True):
        points: list[tuple[float, float]] = []
        for (begin, end), part in zip(phases.values(), parts, strict=True):
            for i, size in enumerate(part):
                x, y = begin + (end - begin) * i / max(1, len(part) - 1), 300 - 250e-6 * size / top
                is_bend = not points or abs(y - points[-1][1]) > 1 or x - points[-1][0] > 20
                points += [(x, y)] * (is_bend or i == len(part) - 1)
        picture.line(*points, stroke=stroke)
        first, peak = parts[0][0] / 1e6, max(map(max, parts)) / 1e6
        print(f"{words}: {first:.0f} MB between steps, {peak:.0f} MB at most")
    picture.save(name)


# Accuracy by the global batch


RULES = {  # for the learning rate: colour, dashes, and flags
    "capped-linear": (ORANGE, "", []),
    "linear": (RED, "7 3", ["--max-grad-norm", "0"]),
    "sqrt": (BLUE, "2 3", ["--max-grad-norm", "0"]),
    "none": (GREY, "9 3 2 3", ["--max-grad-norm", "0"]),
}
BATCHES, EPOCHS, SEEDS = (96, 384, 768, 1536, 3072, 6144), (1, 5), (0, 1, 2)


def accuracy_of(rule: str, batch: int, epochs: int, seed: int, extra: list[str]) -> float:
    """Train once, and return the accuracy on the test set."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--batch-size", batch, "--epochs", epochs, "--seed", seed, "--lr-scaling", rule]
        command = [sys.executable, DOCS.parent / "train_single.py", *words, *RULES[rule][2]]
        command += ["--no-tensorboard", "--no-progress", "--run-dir", f"{folder}/run", *extra]
        ended = subprocess.run(
            [*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if ended.returncode and "not finite" in ended.stderr:
            return 0.1  # the rate was too high, and the run ended: as good as a guess
        if ended.returncode:
            raise RuntimeError(ended.stderr)
        return json.loads(Path(folder, "run", "summary.json").read_text())["test_accuracy"]


def draw_large_batch(name: str, extra: tuple[str, ...] = ()) -> None:
    picture = Picture(
        *(354, "Test accuracy against the global batch, mean of 3 seeds"),
        "MNIST, train_single.py. All rules but capped-linear with --max-grad-norm 0.",
    )
    picture.legend({rule: colour for rule, (colour, *_) in RULES.items()}, 130)

    def place(left: float, batch: int, accuracy: float) -> tuple[float, float]:
        error = min(1.0, max(0.005, 1 - accuracy))
        x = left + 340 * math.log(batch / BATCHES[0]) / math.log(BATCHES[-1] / BATCHES[0])
        return x, 64 + 240 * math.log(error / 0.005) / math.log(1 / 0.005)

    for epochs, left in zip(EPOCHS, (80.0, 510.0), strict=True):
        title = f"{epochs} epoch{'s' * (epochs > 1)}"
        picture.text(left + 170, 52, title, "title", "middle")
        for accuracy in (0.5, 0.9, 0.95, 0.98, 0.99, 0.995):
            y = place(left, BATCHES[0], accuracy)[1]
            picture.line((left, y), (left + 340, y), dash="1 3")
            picture.text(left - 8, y + 4, f"{accuracy:.1%}", "note", "end")
        for batch in BATCHES:
            picture.text(place(left, batch, 0)[0], 324, f"{batch:,}", "note", "middle")
        for rule, (colour, dash, _) in RULES.items():
            points = []
            for batch in BATCHES:
                runs = [accuracy_of(rule, batch, epochs, seed, [*extra]) for seed in SEEDS]
                points.append(place(left, batch, sum(runs) / len(runs)))
                print(rule, batch, epochs, *runs, flush=True)
            picture.line(*points, stroke=colour, dash=dash)
    picture.text(450, 346, "global batch, images; test accuracy", "note", "middle")
    picture.save(name)


# Memory of a parameter


# Of a parameter, in mixed precision with Adam (https://arxiv.org/abs/1910.02054, 3.1).
PARTS = {"weight": 2, "gradient": 2, "float32 copy and Adam's averages": 12}
DIVIDED = {"DDP": 0, "ZeRO-1": 1, "ZeRO-2": 2, "FSDP": 3}  # how many of the parts, from the last on


def bytes_of_a_parameter(technique: str, devices: int) -> list[float]:
    """Return the bytes that each device holds of each part."""
    first_divided = len(PARTS) - DIVIDED[technique]
    sizes = enumerate(PARTS.values())
    return [size / devices if i >= first_divided else size for i, size in sizes]


def draw_memory(name: str) -> None:
    picture = Picture(
        *(200, "Bytes of a parameter on each of 8 GPUs"),
        "Mixed precision with Adam. ZeRO and FSDP divide parts of the 16 bytes among the GPUs.",
    )
    picture.legend(dict(zip(PARTS, (BLUE, ORANGE, GREEN), strict=True)), 120)
    for i, technique in enumerate(DIVIDED):
        y, x, sizes = 40 + 40 * i, 100.0, bytes_of_a_parameter(technique, 8)
        picture.text(90, y + 14, technique, "title", "end")
        for size, fill in zip(sizes, (BLUE, ORANGE, GREEN), strict=True):
            picture.box(x, y, 42 * size, fill, f"{size:g}")
            x += 42 * size
        picture.text(x + 8, y + 14, f"{sum(sizes):g} bytes")
    picture.save(name)


# Will it get faster


def draw_faster(name: str) -> None:
    from scaling import Link, Step, even_step

    measured, predicted = [], []
    for rate in ("30mbit", "100mbit", "300mbit", "1gbit"):
        script = str(DOCS.parent / "scripts/tools/scaling.py")
        told = run_over_link(rate, script, "--model", "basic", "--batch-size", "64", "--json")
        found = json.loads(told.splitlines()[-1])
        step, link = Step(*found["step"]), Link(*found["link"])
        alone, expected = step.other + step.backward, step.ddp(2, link)
        measured.append((link.bandwidth, alone / found["measured"]))
        predicted.append((link.bandwidth, alone / expected))
        times = [f"{1e3 * seconds:.0f} ms" for seconds in (alone, expected, found["measured"])]
        print(rate, f"{link.bandwidth / 1e9:.4f} GB/s", *times, sep=" | ", flush=True)
    cases = {
        "ResNet-50 on an A100": (BLUE, even_step(0.273, 102e6)),
        "a billion parameters on an A100": (GREEN, even_step(0.788, 4e9)),
    }
    picture = Picture(
        *(330, "Efficiency of DDP on two devices, by the bandwidth between them"),
        "Lines are predicted. Dots are measured over a limited link.",
    )
    names = {"basic on a core: predicted": ORANGE, "measured": RED}
    picture.legend(names | {words: case[0] for words, case in cases.items()}, 200)

    def place(bandwidth: float, share: float) -> tuple[float, float]:
        return 60 + 800 * (math.log10(bandwidth) - 6) / 6, 280 - 240 * share

    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line(place(1e6, share), place(1e12, share), dash="" if share == 0.5 else "1 3")
        picture.text(52, 284 - 240 * share, f"{share:.0%}", "note", "end")
    picture.text(860, 155, "below this line two devices are slower than one", "note", "end")
    links = {"1 Gb/s": 0.125, "10 Gb/s": 1.25, "100 Gb/s": 12.5, "400 Gb/s": 50, "NVLink 4": 450}
    for words, bandwidth in links.items():
        x, _ = place(bandwidth * 1e9, 0)
        picture.line((x, 280), (x, 286))
        picture.text(x, 300, words, "note", "middle")
    for tick in (0.001, 0.01, 0.1, 1, 10, 100, 1000):
        picture.text(place(tick * 1e9, 0)[0], 320, f"{tick:g} GB/s", "note", "middle")
    speeds = [10 ** (6 + i / 10) for i in range(61)]
    for stroke, step in cases.values():
        shares = [(step.other + step.backward) / step.ddp(2, Link(10e-6, b)) for b in speeds]
        picture.line(*map(place, speeds, shares), stroke=stroke)
    picture.line(*(place(*point) for point in predicted), stroke=ORANGE)
    for points, fill in ((predicted, ORANGE), (measured, RED)):
        for x, y in (place(*point) for point in points):
            picture.box(x - 4, y - 4, 8, fill, height=8)
    picture.save(name)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        send_three_ways()
    else:
        for file in sys.argv[1:]:
            globals()[f"draw_{Path(file).stem}"](file)
