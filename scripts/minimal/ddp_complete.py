"""Train MNIST with DistributedDataParallel, and with what a long run needs.

    torchrun --standalone --nproc_per_node 2 scripts/minimal/ddp_complete.py
    torchrun --standalone --nproc_per_node 2 --max-restarts 3 scripts/minimal/ddp_complete.py
    diff scripts/minimal/ddp.py scripts/minimal/ddp_complete.py

Give each run a folder of its own, and start it there. The same command resumes the run from
checkpoint.pt, also with more epochs or another number of processes. To start over, remove that
file. SIGTERM, Ctrl-C or a failed process costs at most the epoch that was being trained. (After a
signal to torchrun itself, torchrun prints a traceback of its own and ends with 1.)

Each addition to ddp.py has a comment that begins with RESUME, RESTART, STOP, LOG, AMP, ACCUMULATE,
CLIP or SEED. For restarts on several machines, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where
you start torchrun.
"""

import argparse
import math
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# The folder of data.py and models.py. Remove this line if yours lie beside your script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import SOURCES, load_tensors
from models import build_model

# AMP: bf16 has the range of float32. fp16 is for GPUs without bf16.
AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train MNIST.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=96, help="of each device")
    parser.add_argument("--dataset", default="mnist", choices=SOURCES)
    parser.add_argument("--data-dir", default="data")
    # AMP, ACCUMULATE, CLIP: the flags of the blocks below that begin with these words.
    parser.add_argument("--amp", default="off", choices=AMP)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    args = parser.parse_args()

    # DDP: torchrun starts the processes. Each process learns from its environment which one it is.
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.exit(2, f"start it with: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}\n")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # STOP: the handler only notes the signal, so that it never cuts a step or a file in two. The
    # training loop looks at the notes. torchrun kills a process that still runs 30 s later.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    # DDP: LOCAL_RANK, the number on this machine, chooses the GPU, since RANK counts over all
    # machines. If a scheduler shows each process a single GPU, that GPU is number 0 for each.
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # DDP: each process waits here until all of them have come.
    # RESTART: torchrun keeps its store when it restarts the processes. The addresses in it are
    # those of ended processes, so each attempt reads and writes under a prefix of its own.
    store, *_ = next(dist.rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    # DDP: with one seed for all, every process would draw the same dropout. The first weights may
    # differ, because DistributedDataParallel overwrites them with those of rank 0.
    torch.manual_seed(rank)

    train_set, test_set = load_tensors(args.dataset, args.data_dir)
    # DDP: each process has its own batch, and one step uses the batches of all processes.
    # ACCUMULATE: one step also uses several batches of each process.
    global_batch_size = args.batch_size * world_size * args.grad_accum_steps
    # DDP: the sampler shuffles, and cuts the epoch into one share for each process. The shares
    # have equal lengths: a process with one batch more would wait for the others for ever.
    train_sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True)
    # DDP: that sampler leaves images out, but each test image has to count exactly once. These
    # shares may differ in length, since no process waits for another one while it evaluates.
    test_loader = DataLoader(test_set, 500, sampler=range(rank, len(test_set), world_size))

    # Two names for one model: dp.py and ddp.py train a wrapped one. All evaluate and save this one.
    raw_model = build_model("convnet").to(device)
    # DDP: the wrapper sends rank 0's weights to all now, and averages gradients in each backward.
    model = DistributedDataParallel(raw_model)
    # Linear scaling: a larger batch makes fewer steps, so each step is longer. The factor is at
    # most four, since larger rates make training fail. The schedule begins with a small rate,
    # because a large one is harmful while the weights are still random.
    lr = 0.1 * min(global_batch_size / 96, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    # ACCUMULATE: an epoch has whole steps only. The batches that are left over are not used.
    steps = len(train_loader) // args.grad_accum_steps
    if steps == 0:
        parser.exit(2, "lower --batch-size: no step is complete\n" if rank == 0 else None)
    # AMP: fp16 loses small gradients, unless the loss is scaled up for the backward.
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

    # RESUME: rank 0 reads the file, and all processes load what it has read. So they never
    # disagree, and only the machine of rank 0 needs the file. None stands for a damaged file.
    saved: list[Any] = [{}]
    if rank == 0 and os.path.exists("checkpoint.pt"):
        saved = [None]
        with suppress(Exception):
            saved = [torch.load("checkpoint.pt", map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(saved, src=0)
    if saved[0] is None:
        parser.exit(1, "checkpoint.pt is damaged: remove it to start over\n" if rank == 0 else None)
    first_epoch = saved[0].get("epochs", 0)
    parts: dict[str, Any] = {"model": raw_model, "optimizer": optimizer, "scaler": scaler}
    # RESUME: a part that has no state in the file stays as it is (the scaler, without fp16).
    for name, part in parts.items():
        part.load_state_dict(saved[0].get(name) or part.state_dict())
    if rank == 0:
        print(f"{first_epoch} of {args.epochs} epochs done, an interrupted one starts over")
        # LOG: the x-axis counts images, whatever the batch is. From purge_step on, TensorBoard
        # hides what an earlier attempt wrote.
        writer = SummaryWriter("runs", purge_step=first_epoch * steps * global_batch_size + 1)

    for epoch in range(first_epoch, args.epochs):
        # DDP: without this call, every epoch would have the order of the first.
        train_sampler.set_epoch(epoch)
        # SEED: the numbers depend on process and epoch, not on what ran before. So an epoch that is
        # repeated draws the same dropout, and no state of a generator has to be saved.
        torch.manual_seed((epoch + 1) * world_size + rank)
        model.train()
        # LOG: rank 0 shows a bar. With None it does so only in a terminal.
        batches = iter(train_loader)
        for step in tqdm(range(steps), f"epoch {epoch + 1}", leave=False, disable=rank > 0 or None):
            optimizer.zero_grad()
            # ACCUMULATE: the backwards add up their gradients. Only the last one of a step sends
            # them to the other processes (as with model.no_sync() around the others).
            for micro_step in range(1, args.grad_accum_steps + 1):
                images, labels = next(batches)
                model.require_backward_grad_sync = micro_step == args.grad_accum_steps
                # AMP: around the forward only. The backward uses the types that the forward used.
                with torch.autocast(device.type, AMP[args.amp], enabled=args.amp != "off"):
                    loss = F.cross_entropy(model(images.to(device)), labels.to(device))
                scaler.scale(loss / args.grad_accum_steps).backward()
            # CLIP: gradients are clipped by their true size, so they are unscaled first. They are
            # equal in all processes by now, and so are the norm and a step that fp16 skips.
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            # RESUME: the rate is a function of the position. It rises for 30 % of the run and falls
            # for the rest. So it needs no state, and more epochs work. The state of OneCycleLR has
            # the old number of steps, and beyond them it raises an error.
            images_seen = (epoch * steps + step + 1) * global_batch_size
            done = (epoch * steps + step + 0.5) / (args.epochs * steps)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(done / 0.3, (1 - done) / 0.7)
            scaler.step(optimizer)
            scaler.update()
            # STOP: all processes leave at the same step, or some would wait for one that has left.
            # The GPU has to finish its work for that, so the processes agree only at every tenth
            # step. Ten steps have to fit into the 30 s of torchrun.
            if step % 10 == 0:
                news = torch.tensor([loss.item(), len(signals)], device=device) / world_size
                dist.all_reduce(news)
                train_loss, stop = news.tolist()
                if stop or not math.isfinite(train_loss):
                    break
                if rank == 0:
                    writer.add_scalar("loss/train", train_loss, images_seen)
        # STOP: nothing is saved here, because the file holds the state at the epoch's beginning.
        # The exit status is 0, so that torchrun does not restart what somebody has stopped.
        if stop:
            if rank == 0:
                print(f"stopped: the next start repeats epoch {epoch + 1} from its beginning")
            break

        # DDP: batch normalisation's running statistics differ between the processes, as each has
        # seen other images. Send rank 0's to all, so that all evaluate the model that is saved.
        for buffer in raw_model.buffers():
            dist.broadcast(buffer, src=0)
        raw_model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # of loss, correct and count
        with torch.no_grad():
            for images, labels in test_loader:
                logits, labels = raw_model(images.to(device)), labels.to(device)
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += len(labels)
        # DDP: this adds up the sums of all shares, in place. Every process has to call it.
        dist.all_reduce(sums)
        # Divide last: the last batch may be shorter, and a mean of means would then be wrong.
        loss, correct, count = sums.tolist()
        # RESUME: a model that is broken must not replace a good checkpoint. Every process has the
        # same sums, so all of them leave here.
        if not math.isfinite(loss + train_loss):
            parser.exit(1, "the loss is not finite: nothing was saved\n" if rank == 0 else None)
        # DDP: one process prints and writes. What you add below this line runs on rank 0 alone, so
        # it must not wait for other processes.
        if rank != 0:
            continue
        print(f"epoch {epoch + 1}: loss {loss / count:.4f}, {correct / count:.2%} of {count:.0f}")
        # Written under another name first: model.pt is whole, even if this process is killed here.
        torch.save(raw_model.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")
        # LOG: the flush makes sure that a kill loses nothing of a complete epoch.
        writer.add_scalar("accuracy/test", correct / count, images_seen)
        writer.flush()
        # RESUME: written last, because an epoch in this file is not repeated.
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"epochs": epoch + 1}, "checkpoint.pt.tmp")
        os.replace("checkpoint.pt.tmp", "checkpoint.pt")
    # DDP: not in a `finally` and not at exit. After an exception in one process the others wait in
    # an all-reduce, this call can wait for them with NCCL, and torchrun would see no failure.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
