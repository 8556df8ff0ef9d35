"""Draw the pictures of these pages that show measurements, and measure first.

python docs/pictures.py how_ddp_works.svg
python docs/pictures.py sending_gradients.svg    # wants root and iproute2: a link of 1 Gb/s
python docs/pictures.py memory_of_a_step.svg     # wants two GPUs
python docs/pictures.py faster.svg               # wants root and iproute2: links of 0.03 to 1 Gb/s
"""

import json
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent
for folder in (DOCS.parent, DOCS.parent / "scripts/lessons", DOCS.parent / "scripts/tools"):
    sys.path.insert(0, str(folder))

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
    """An SVG file. Each call of ``row`` begins a new line of it."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.size = f'viewBox="0 0 {width} {height}" width="{width}"'
        self.head = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        self.rows: list[str] = []

    def row(self) -> None:
        self.rows.append("")

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "") -> None:
        look = f'fill="{fill}"' if fill else 'class="frame"'
        place = f'x="{x:.1f}" y="{y:.1f}" width="{max(1, width):.1f}" height="{height:.1f}"'
        self.rows[-1] += f"<rect {place} {look}/>"

    def text(self, x: float, y: float, words: str, look: str = "note", anchor: str = "") -> None:
        anchor = f' text-anchor="{anchor}"' if anchor else ""
        self.rows[-1] += (
            f'<text x="{x:.1f}" y="{y:.1f}" class="{look}"{anchor}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, fill: str, words: str) -> None:
        self.rect(x, y, width, 20, fill)
        if 6 * len(words) < width:
            self.text(x + width / 2, y + 14, words, "inside", "middle")

    def line(self, points: list[tuple[float, float]], stroke: str = "", dash: str = "") -> None:
        look = f' style="stroke: {stroke}; stroke-width: 2"' if stroke else ""
        look += f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.rows[-1] += f'<polyline points="{path}"{look}/>'

    def legend(self, x: float, names: dict[str, str], step: float) -> None:
        self.row()
        for i, (words, fill) in enumerate(names.items()):
            self.rect(x + i * step, 6, 12, 12, fill)
            self.text(x + i * step + 17, 16, words)

    def save(self, name: str) -> None:
        body = "\n".join(self.rows)
        (DOCS / name).write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} role="img">\n{self.head}\n'
            f"<style>{STYLE}</style>\n{body}\n</svg>\n"
        )


def run_over_link(rate: str, *command: str) -> str:
    """Run a command as two ranks in two network namespaces with a link of ``rate`` between them.

    Return rank 0's output.
    """
    names = [f"picture{os.getpid()}-{rank}" for rank in range(2)]

    def shell(line: str) -> None:
        subprocess.run(line.split(), check=True)

    limit = f"tbf rate {rate} burst 70kb latency 50ms"
    with ExitStack() as stack:
        for name in names:
            shell(f"ip netns add {name}")
            stack.callback(shell, f"ip netns delete {name}")
        shell(f"ip -n {names[0]} link add link0 type veth peer name link1 netns {names[1]}")
        for rank, name in enumerate(names):
            shell(f"ip -n {name} address add {ADDRESSES[rank]}/24 dev link{rank}")
            shell(f"ip -n {name} link set lo up")
            shell(f"ip -n {name} link set link{rank} up")
            shell(f"tc -n {name} qdisc add dev link{rank} root {limit}")
        processes = []
        for rank, name in enumerate(names):
            meet = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": "2"}
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": f"link{rank}"}
            words = ["ip", "netns", "exec", name, sys.executable, *command]
            environment = {**os.environ, **meet, **own, "OMP_NUM_THREADS": "1"}
            pipe = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
            processes.append(pipe)
        told = [process.communicate(timeout=400)[0] for process in processes]
        return told[0]


# How DDP works


def draw_how_ddp_works(name: str) -> None:
    import bucket_overlap
    from _lesson import context, run_ranks

    context.set_forkserver_preload(["torch._dynamo"])
    events, sizes = run_ranks(bucket_overlap.work, 2, {"bucket_cap_mb": 2.0})[0].value[1]
    picture = Picture(
        *(900, 250, "How DDP sends gradients during the backward"),
        "A model of three layers. A hook on each parameter counts the bucket's ready gradients. "
        "A full bucket goes to the process group, which averages it beside the backward.",
    )
    left, width = 150, 150
    rows = {"backward": 24, "hook of the weight": 66, "DDP's reducer": 108, "process group": 150}
    rows["thread or stream"] = 192
    picture.row()
    for words, y in rows.items():
        picture.text(left - 12, y + 14, words, "title", "end")
    layers = [event for event in events if event.startswith("layer")]
    sends = [i for i, event in enumerate(events) if event.startswith("send")]
    members = [sum(e.startswith("layer") for e in events[: i + 1]) for i in sends]
    members = [count - before for count, before in zip(members, [0, *members], strict=False)]
    bucket, ready, x, end = 0, 0, float(left), 0.0
    for layer in layers:
        picture.row()
        ready += 1
        picture.box(x, rows["backward"], width - 6, ORANGE, f"gradient of {layer}")
        words = f"bucket {bucket}: {ready} of {members[bucket]} ready"
        picture.box(x + width - 40, rows["hook of the weight"], 60, GREY, "called")
        picture.box(x + width - 40, rows["DDP's reducer"], width - 6, GREY, words)
        picture.line([(x + width - 10, 44), (x + width - 10, 66)])
        picture.line([(x + width - 10, 86), (x + width - 10, 108)])
        if ready == members[bucket]:
            picture.line([(x + width - 10, 128), (x + width - 10, 150)])
            words = f"all_reduce, {sizes[bucket] / 1e6:.2f} MB"
            picture.box(x + width - 40, rows["process group"], width - 6, RED, words)
            picture.line([(x + width - 10, 170), (x + width - 10, 192)])
            begin, length = max(end, x + width - 40), 0.95 * width * members[bucket] / max(members)
            picture.box(begin, rows["thread or stream"], length, RED, f"bucket {bucket}")
            end = begin + length + 6
            bucket, ready = bucket + 1, 0
        x += width
    picture.row()
    picture.box(x, rows["backward"], end - x, "", "waits")
    picture.box(end + 8, rows["backward"], 110, GREEN, "optimizer.step()")
    picture.line([(end, rows["thread or stream"]), (end, 44)], dash="3 3")
    picture.text(
        left, 236, "Time goes from left to right. While bucket 0 is sent, the backward goes on."
    )
    picture.save(name)


# Three ways to send gradients


def send_three_ways() -> None:
    """Be a rank: time three ways to send; rank 0 prints the fastest step of each as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    images, labels = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    sends: list[tuple[float, float, int]] = []
    computed: list[float] = []  # when the loss was there, and then each gradient

    def send(values: Tensor) -> torch.futures.Future[Tensor]:
        """Start an all-reduce, and note when it begins and ends."""
        begin = time.perf_counter()
        future = dist.all_reduce(values, async_op=True).get_future()

        def ended(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            sends.append((begin, time.perf_counter(), values.nbytes))
            return done.value()[0].div_(2)

        return future.then(ended)

    def build(way: str) -> tuple[nn.Module, Any]:
        raw_model = models.build_model("resnet18")
        for p in raw_model.parameters():
            p.register_hook(lambda gradient: computed.append(time.perf_counter()))
        parameters, pending = list(raw_model.parameters()), list[Any]()

        def wait() -> None:
            while pending:
                pending.pop().wait()

        def send_all() -> None:
            send(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])).wait()

        if way == "buckets":
            model = DistributedDataParallel(raw_model)
            model.register_comm_hook(None, lambda state, bucket: send(bucket.buffer()))
            return model, lambda: None
        if way == "each":
            for p in parameters:
                p.register_post_accumulate_grad_hook(lambda p: pending.append(send(p.grad)))
            return raw_model, wait
        return raw_model, send_all

    ways = {way: build(way) for way in ("after", "each", "buckets")}
    found: dict[str, list[Any]] = {way: [] for way in ways}
    for _ in range(30):
        for way, (model, finish) in ways.items():
            model.zero_grad()
            sends.clear()
            computed.clear()
            dist.barrier()
            begin = time.perf_counter()
            loss = F.cross_entropy(model(images), labels)
            computed.append(time.perf_counter())
            loss.backward()
            finish()
            end = time.perf_counter()
            moved = [(a - begin, b - begin, size) for a, b, size in sends]
            found[way].append([end - begin, computed[0] - begin, computed[-1] - begin, moved])
    for steps in found.values():
        steps[:] = min(steps[3:])  # the one that other programs disturbed least
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def hidden(sends: list[list[float]], done: float) -> tuple[float, float]:
    """Return the seconds in which something is sent, and those before the backward ends."""
    total = before = reach = 0.0
    for begin, end, _ in sorted(sends):
        begin = max(begin, reach)
        if end > begin:
            total += end - begin
            before += max(0.0, min(end, done) - begin)
            reach = end
    return total, before


def draw_sending_gradients(name: str) -> None:
    told = run_over_link("1gbit", __file__, "rank")
    found = json.loads(told.splitlines()[-1])
    titles = {
        "after": "all gradients after the backward",
        "each": "each gradient from its hook",
        "buckets": "buckets from their hooks: DDP",
    }
    picture = Picture(
        *(900, 246, "One step of two ranks, with three ways to send the gradients"),
        "ResNet-18, 64 images on each of two ranks, a CPU core each, a link of 1 Gb/s.",
    )
    names = {"forward": BLUE, "backward": ORANGE, "all-reduce": RED}
    picture.legend(60, names, 100)
    scale = 820 / max(step[0] for step in found.values())
    for i, (way, (end, computed, done, sends)) in enumerate(found.items()):
        y = 36 + 68 * i
        total, before = hidden(sends, done)
        calls, size = len(sends), sum(send[2] for send in sends) / 1e6
        picture.row()
        words = f"{titles[way]}: {calls} call{'s' * (calls > 1)}, {size:.1f} MB"
        told = f"step {1e3 * end:.0f} ms; sending {1e3 * total:.0f} ms, {before / total:.0%} hidden"
        picture.text(60, y, words, "title")
        picture.text(880, y, told, "note", "end")
        picture.box(60, y + 6, scale * computed, BLUE, "forward")
        picture.box(60 + scale * computed, y + 6, scale * (done - computed), ORANGE, "backward")
        picture.box(60 + scale * done, y + 6, scale * (end - done), "", "waits")
        for begin, stop, _ in sends:
            picture.rect(60 + scale * begin, y + 28, scale * (stop - begin), 14, RED)
    picture.row()
    for tick in range(0, int(1e3 * 820 / scale) + 1, 200):
        picture.text(60 + scale * tick / 1e3, 240, f"{tick} ms", "note", "middle")
    picture.save(name)


# Memory over a step


def bytes_over_a_step(technique: str) -> tuple[list[list[list[float]]], list[list[int]]]:
    """Return for each device its MB after each change in a step, and where its phases end."""
    raw_model = models.build_model("resnet18").to("cuda:0")
    model: nn.Module = nn.DataParallel(raw_model, [0, 1])
    if technique == "ddp":
        model = DistributedDataParallel(raw_model, device_ids=[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1, momentum=0.9)
    batch = 64 if technique == "ddp" else 128
    record: Any = torch.cuda.memory._record_memory_history
    ends: list[list[int]] = []

    def history() -> list[list[dict[str, Any]]]:
        return torch.cuda.memory._snapshot()["device_traces"][:2]

    def end_phase(is_last: bool) -> None:
        if is_last:
            ends.append([len(events) for events in history()])

    for step in range(4):
        images, labels = torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,))
        is_last = step == 3
        if is_last:
            at_first = [torch.cuda.memory_allocated(device) for device in range(2)]
            record(max_entries=10**6, context=None)
        images, labels = images.to("cuda:0"), labels.to("cuda:0")
        outputs = model(images)
        loss = F.cross_entropy(outputs, labels)
        del outputs
        end_phase(is_last)
        loss.backward()
        end_phase(is_last)
        optimizer.step()
        optimizer.zero_grad()
        del images, labels, loss
        end_phase(is_last)
    curves = []
    for device, events in enumerate(history()):
        now, curve = at_first[device], []
        for event in events:
            sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
            now += sign * event["size"]
            curve.append(now / 1e6)
        curves.append([[at_first[device] / 1e6], curve])
    record(enabled=None)
    return curves, ends


def draw_memory_of_a_step(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    picture = Picture(
        *(900, 330, "Memory over one step: the two devices of DP, and a device of DDP"),
        "ResNet-18, 64 images on each device, SGD with momentum. What torch's allocator counts.",
    )
    left, widths = 60, (260, 380, 140)
    lines = {}
    for technique, devices in (
        ("dp", {0: "DP, first device", 1: "DP, second device"}),
        ("ddp", {0: "DDP, each device"}),
    ):
        curves, ends = bytes_over_a_step(technique)
        for device, words in devices.items():
            (first,), curve = curves[device]
            points, begin, x = [(float(left), first)], 0, float(left)
            for width, phase in zip(widths, ends, strict=True):
                part = curve[begin : phase[device]]
                points += [(x + width * (i + 1) / len(part), mb) for i, mb in enumerate(part)]
                begin, x = phase[device], x + width
            lines[words] = points
    top = 20 * math.ceil(max(mb for points in lines.values() for _, mb in points) / 20)
    picture.legend(left, dict(zip(lines, (ORANGE, GREY, BLUE), strict=True)), 210)
    picture.row()
    for tick in range(0, top + 1, 40):
        y = 300 - 250 * tick / top
        picture.line([(left, y), (left + sum(widths), y)], dash="1 3")
        picture.text(left - 8, y + 4, f"{tick} MB", "note", "end")
    x = float(left)
    for width, words in zip(widths, ("forward and loss", "backward", "optimizer"), strict=True):
        picture.text(x + width / 2, 322, words, "title", "middle")
        picture.line([(x + width, 40), (x + width, 300)])
        x += width
    for (words, points), stroke in zip(lines.items(), (ORANGE, GREY, BLUE), strict=True):
        picture.row()
        kept = points[:1]  # the points between which a line bends
        for point, after in zip(points[1:], [*points[2:], None], strict=True):
            if after is None or abs(point[1] - kept[-1][1]) > 1 or point[0] - kept[-1][0] > 20:
                kept.append(point)
        picture.line([(x, 300 - 250 * mb / top) for x, mb in kept], stroke)
        peak = max(mb for _, mb in points)
        print(f"{words}: {points[0][1]:.0f} MB between steps, {peak:.0f} MB at most")
    picture.save(name)
    dist.destroy_process_group()


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
        told = f"alone {1e3 * alone:.0f} ms, predicted {1e3 * expected:.0f} ms"
        speed = f"{rate}: {link.bandwidth / 1e9:.4f} GB/s"
        print(f"{speed}, {told}, measured {1e3 * found['measured']:.0f} ms", flush=True)
    cases = {
        "ResNet-50 on an A100": (BLUE, even_step(0.273, 102e6)),
        "a billion parameters on an A100": (GREEN, even_step(0.788, 4e9)),
    }
    picture = Picture(
        *(900, 330, "Efficiency of DDP on two devices, by the bandwidth between them"),
        "Lines are predicted. Dots are measured over a limited link.",
    )
    names = {"basic on a core: predicted": ORANGE, "measured": RED}
    picture.legend(60, names | {words: case[0] for words, case in cases.items()}, 200)
    low, high, left, width = -3.0, 3.0, 60, 800

    def place(bandwidth: float, share: float) -> tuple[float, float]:
        return left + width * (math.log10(bandwidth / 1e9) - low) / (high - low), 280 - 240 * share

    picture.row()
    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line([place(1e6, share), place(1e12, share)], dash="" if share == 0.5 else "1 3")
        picture.text(left - 8, 284 - 240 * share, f"{share:.0%}", "note", "end")
    picture.text(
        left + width, 275 - 120, "below this line two devices are slower than one", "note", "end"
    )
    links = {"1 Gb/s": 0.125, "10 Gb/s": 1.25, "100 Gb/s": 12.5, "400 Gb/s": 50, "NVLink 4": 450}
    for words, bandwidth in links.items():
        x, _ = place(bandwidth * 1e9, 0)
        picture.line([(x, 280), (x, 286)])
        picture.text(x, 300, words, "note", "middle")
    for tick in (0.001, 0.01, 0.1, 1, 10, 100, 1000):
        picture.text(place(tick * 1e9, 0)[0], 320, f"{tick:g} GB/s", "note", "middle")
    for stroke, step in cases.values():
        picture.row()
        alone = step.other + step.backward
        speeds = [10 ** (6 + i / 10) for i in range(61)]
        points = [(b, alone / step.ddp(2, Link(10e-6, b))) for b in speeds]
        picture.line([place(*point) for point in points], stroke)
    picture.row()
    picture.line([place(*point) for point in predicted], ORANGE)
    for points, fill in ((predicted, ORANGE), (measured, RED)):
        for x, y in (place(*point) for point in points):
            picture.rect(x - 4, y - 4, 8, 8, fill)
    picture.save(name)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        send_three_ways()
    else:
        for file in sys.argv[1:]:
            globals()[f"draw_{Path(file).stem}"](file)
