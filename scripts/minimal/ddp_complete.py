"""Train MNIST with DistributedDataParallel, and with what a long run needs.

    torchrun --standalone --nproc_per_node 2 scripts/minimal/ddp_complete.py
    diff scripts/minimal/ddp.py scripts/minimal/ddp_complete.py

Give each run a folder of its own, and start it there. The same command resumes the run from
checkpoint.pt, also with more epochs or another number of processes. To start over, remove that
file. After SIGTERM or Ctrl-C the run goes on at the same image. With the same number of processes
its weights become those of a run that was never stopped, dropout included. Only random transforms
in the workers of --num-workers draw other numbers then, because new workers begin with new seeds.
A failed process costs at most the epoch that was being trained. (After a signal to itself torchrun
prints a traceback of its own and ends with 1.)

With this command torchrun starts failed processes again. Without the variable they would read the
addresses of ended processes. The variable helps with --standalone and --rdzv_backend c10d, but not
with --master_addr:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node 2 \
        --max-restarts 3 scripts/minimal/ddp_complete.py

If torchrun itself is killed with SIGKILL, its processes train on. With this command they stop and
save, because the kernel then sends them SIGTERM:

    torchrun --standalone --nproc_per_node 2 --no-python \
        setpriv --pdeathsig TERM python scripts/minimal/ddp_complete.py

Each addition to ddp.py has a comment that begins with RESUME, RESTART, STOP, LOG, LOAD, AMP,
ACCUMULATE, CLIP or SEED.
"""

import argparse
import io
import math
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any, NoReturn

# DDP: with the NCCL class that torch 2.15 takes by default, a GPU computes nothing while gradients
# travel. 0 chooses the class before it. Remove the line when a later torch computes and sends at
# the same time by default.
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

# The folder of data.py and models.py. Remove this line if yours lie beside your script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import SOURCES, load_tensors
from models import build_model

# AMP: bf16 has the range of float32. fp16 is for GPUs without bf16.
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# LOAD: torchrun passes a signal on to the whole process group of each process that it started. A
# loader worker that dies of it would turn a clean stop into a crash, so workers leave the group.
def leave_group(worker_id: int) -> None:
    os.setpgrp()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train MNIST.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=96, help="of each device")
    parser.add_argument("--dataset", default="mnist", choices=SOURCES)
    parser.add_argument("--data-dir", default="data")
    # LOAD, AMP, ACCUMULATE, CLIP: the flags of the blocks below that begin with these words.
    parser.add_argument("--num-workers", type=int, default=0, help="of each process")
    parser.add_argument("--lr", type=float, default=0.1, help="the highest rate, for 96 images")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--amp", default="off", choices=AMP)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="0: no clipping")
    args = parser.parse_args()

    # DDP: torchrun starts the processes, and numbers them. RANK counts over all machines.
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.exit(2, f"start it with: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}\n")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    # RESTART: any process may call this function. One of them says what is wrong.
    def fail(reason: str) -> NoReturn:
        parser.exit(1, f"{reason}\n" if rank == 0 else None)

    # RESTART: if torchrun shares its store, a restart finds the addresses of ended processes there.
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shares_store and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        fail("--max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and no --master_addr")
    # STOP: the handler only notes the signal, so that it never cuts a step or a file in two. The
    # training loop looks at the notes. torchrun kills a process that still runs 30 s later.
    signals: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: signals.append(number))
    # DDP: two processes cannot share a GPU, since NCCL does not connect them. torchrun says in
    # LOCAL_WORLD_SIZE how many processes this machine has.
    if 0 < torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        parser.exit(2, "too few GPUs: CUDA_VISIBLE_DEVICES= torchrun ... starts it on the CPU\n")
    # DDP: LOCAL_RANK counts on this machine. Each process takes a GPU of its own, or the only GPU
    # that it can see.
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # DDP: the processes wait for each other here. From here on they can call collectives. All of
    # them have to make the same calls, in the same order.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)

    train_set, test_set = load_tensors(args.dataset, args.data_dir)
    # DDP: from here on the ranks draw different random numbers, since the rank is the seed. So the
    # first weights differ too, until the model is wrapped. The data comes before this line, because
    # a random_split has to be the same on all ranks.
    torch.manual_seed(rank)
    # DDP: --batch-size is the share of each process. A step uses the batches of all processes, and
    # the learning rate below follows the size of that global batch.
    # ACCUMULATE: one step also uses several batches of each process.
    global_batch_size = args.batch_size * world_size * args.grad_accum_steps
    assert global_batch_size <= len(train_set), "lower --batch-size: no step is complete"
    # DDP: the sampler shuffles the epoch alike on all ranks, and then gives each rank its share.
    # All shares have the same length, or a rank with one batch more would wait for ever.
    train_sampler = DistributedSampler(train_set, drop_last=True)
    # LOAD: only pinned memory can be copied to a GPU while the process goes on.
    extra: dict[str, Any] = {"num_workers": args.num_workers, "worker_init_fn": leave_group}
    extra["pin_memory"] = device.type == "cuda"
    # DDP: each rank takes an unpadded share of the test set, so every image counts exactly once.
    # Shares of different length do no harm, since no rank waits for another one while it evaluates.
    # LOAD: the test set is loaded in the same way.
    test_loader = DataLoader(test_set, 500, sampler=range(rank, len(test_set), world_size), **extra)

    # Two names for one model: dp.py and ddp.py train a wrapped one. All evaluate and save this one.
    raw_model = build_model("convnet").to(device)
    # DDP: wrapping broadcasts rank 0's weights, so that all ranks start from the same.
    model = DistributedDataParallel(raw_model)
    # Linear scaling: with a larger batch an epoch has fewer steps, so each step has a higher rate.
    # The factor is at most four, since higher rates make training fail.
    # RESUME: this is the highest rate. The loop sets the rate of each step, and the weight decay,
    # since the optimizer's saved state has those of the run before.
    lr = args.lr * min(global_batch_size / 96, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    # AMP: fp16 loses small gradients, unless the loss is scaled up for the backward.
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    autocast = torch.autocast(device.type, AMP[args.amp], enabled=args.amp != "off")

    # RESUME: rank 0 reads the file, and all processes load what it has read. So they never
    # disagree, and only the machine of rank 0 needs the file.
    file = Path("checkpoint.pt")
    content: list[Any] = [file.read_bytes() if rank == 0 and file.exists() else None]
    dist.broadcast_object_list(content, src=0)
    # RESUME: the position counts the images of all epochs, those that an epoch leaves out included.
    position, train_loss, stop = 0, 0.0, 0.0
    parts: dict[str, Any] = {"model": raw_model, "optimizer": optimizer, "scaler": scaler}
    try:
        if content[0] is not None:
            saved = torch.load(io.BytesIO(content[0]), map_location="cpu", weights_only=True)
            position = saved["position"]
            # RESUME: DDP orders its buckets after the first backward. From three processes on, the
            # order decides the last bits of a sum. So a backward comes first, whose gradients are
            # zero, and the weights become those of a run that was never stopped.
            (0 * model(torch.stack([train_set[0][0]] * 2).to(device)).sum()).backward()
            # A part that has no state in the file stays as it is (the scaler, without fp16).
            for name, part in parts.items():
                part.load_state_dict(saved[name] or part.state_dict())
    except Exception as error:  # another model, a damaged file, an object that is no tensor
        reason = f"{type(error).__name__}: {error}".split("WeightsUnpickler error: ")[-1]
        fail(f"move checkpoint.pt away to start over: {textwrap.shorten(reason, 250)}")
    if rank == 0:
        print(f"{position / len(train_set):.2f} epochs are done, and --epochs is {args.epochs}")
        # LOG: the x-axis counts images, whatever the batch is. From purge_step on, TensorBoard
        # hides what an earlier attempt wrote.
        writer = SummaryWriter("runs", purge_step=position + 1)

    # RESUME: like model.pt, the file is whole even if this process is killed here.
    def save() -> None:
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"position": position}, "checkpoint.pt.tmp")
        os.replace("checkpoint.pt.tmp", "checkpoint.pt")

    # RESUME: an interrupted epoch goes on.
    for epoch in range(position // len(train_set), args.epochs):
        # DDP: without this call, every epoch would have the order of the first.
        train_sampler.set_epoch(epoch)
        # RESUME: the processes take images in turn. So they have used the first ones of each share,
        # and another number of processes can go on from there.
        left = list(train_sampler)[position % len(train_set) // world_size :]
        # ACCUMULATE: an epoch has whole steps only. The images that are left over are not used.
        left = left[: len(left) - len(left) % (args.batch_size * args.grad_accum_steps)]
        train_loader = DataLoader(train_set, args.batch_size, sampler=left, **extra)
        model.train()
        # SEED: the numbers depend on process and position, not on what ran before. So a resumed run
        # draws the same dropout, and no state of a generator has to be saved. This comes after
        # iter(), which draws a number for the workers.
        batches = iter(train_loader)
        torch.manual_seed(position * world_size + rank)
        for number, (images, labels) in enumerate(batches, start=1):
            # ACCUMULATE: the backwards of a step add up their gradients. Only the last one sends
            # them to the other processes (as with model.no_sync() around the others).
            model.require_backward_grad_sync = number % args.grad_accum_steps == 0
            # LOAD: from pinned memory this copy runs while the GPU computes.
            images, labels = (x.to(device, non_blocking=True) for x in (images, labels))
            # AMP: around the forward only. The backward uses the types that the forward used.
            with autocast:
                loss = F.cross_entropy(model(images), labels)
            # DDP: the backward averages the gradients over the ranks, bucket by bucket, while it
            # computes them. optimizer.step() sends nothing.
            # ACCUMULATE, AMP: a step takes the mean of its batches.
            scaler.scale(loss / args.grad_accum_steps).backward()
            # RESUME, SEED: the next batch has another position.
            position += args.batch_size * world_size
            torch.manual_seed(position * world_size + rank)
            if not model.require_backward_grad_sync:
                continue
            # CLIP: gradients are clipped by their true size, so they are unscaled first. They are
            # equal in all processes by now, and so are the norm and a step that fp16 skips.
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            # RESUME: the rate is a function of the position. It rises for 30 % of the run and falls
            # for the rest. So it needs no state, and more epochs work. The state of OneCycleLR has
            # the old number of steps, and beyond them it raises an error.
            done = (position - global_batch_size / 2) / (args.epochs * len(train_set))
            for group in optimizer.param_groups:
                group["lr"] = lr * min(done / 0.3, (1 - done) / 0.7)
                group["weight_decay"] = args.weight_decay
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            # DDP: rank 0 alone prints, the loss of its own batch.
            if rank == 0 and number % 100 == 0:
                print(f"batch {number} of {len(train_loader)}: loss {loss.item():.4f}", flush=True)
            # STOP: all processes leave at the same step, or some would wait for one that has left.
            # The GPU has to finish its work for that, so the processes agree only at every tenth
            # step. Ten steps have to fit into the 30 s of torchrun. After the last step of an epoch
            # the evaluation comes first.
            if number // args.grad_accum_steps % 10 == 1 and number < len(train_loader):
                news = torch.tensor([loss.item(), len(signals)], device=device) / world_size
                dist.all_reduce(news)
                train_loss, stop = news.tolist()
                if stop or not math.isfinite(train_loss):
                    break
                if rank == 0:
                    writer.add_scalar("loss/train", train_loss, position)
        # RESUME: a model that is broken must not replace a good checkpoint. Every process has the
        # same weights and the same loss here, so all of them end.
        if not (math.isfinite(train_loss) and all(x.isfinite().all() for x in model.parameters())):
            fail("the loss or a weight is not finite: nothing was saved")
        # STOP: the exit status is 0, so that torchrun does not restart what somebody has stopped.
        if stop:
            if rank == 0:
                save()
                print(f"stopped: the next start goes on after {position} images")
            break
        position = (epoch + 1) * len(train_set)

        # DDP: each rank evaluates the model that rank 0 saves, with rank 0's running statistics.
        # The other ranks have seen other images, so theirs differ.
        # A buffer may be a part of a tensor, and only contiguous memory is sent whole.
        for original in raw_model.buffers():
            buffer = original.contiguous()
            dist.broadcast(buffer, src=0)
            original.copy_(buffer)
        raw_model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # of loss, correct and count
        # AMP: the evaluation computes as the training did.
        with torch.no_grad(), autocast:
            for images, labels in test_loader:
                logits, labels = raw_model(images.to(device)), labels.to(device)
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += len(labels)
        # DDP: each rank has counted its own images. Their sums are added up over the ranks, in
        # place, before anything is divided.
        dist.all_reduce(sums)
        # Divide last: the last batch may be shorter, and a mean of means would then be wrong.
        loss, correct, count = sums.tolist()
        # DDP: rank 0 alone writes and prints. What you add below this line runs there alone, so it
        # must not wait for other ranks.
        if rank != 0:
            continue
        print(f"epoch {epoch + 1}: loss {loss / count:.4f}, {correct / count:.2%} of {count:.0f}")
        # Written under another name first: model.pt is whole, even if this process is killed here.
        torch.save(raw_model.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")
        # LOG: the flush makes sure that a kill loses nothing of a complete epoch.
        writer.add_scalar("accuracy/test", correct / count, position)
        writer.flush()
        # RESUME: written last, because an epoch in this file is not repeated.
        save()
    # DDP: not in a `finally`. After an error on one rank, the others wait in a collective, and this
    # call could wait for them.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
