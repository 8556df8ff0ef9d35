"""A trace of a few steady steps. scripts/tools/trace.py shows where their time went."""

import os
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from utils.device import synchronize
from utils.throughput import WARMUP_STEPS

SETTLING_STEPS = 2  # of the profiler itself, after those that images/s leaves out
PROFILED_STEPS = 10  # enough to average, and a trace of some 100 KB
FIRST_STEP = WARMUP_STEPS + SETTLING_STEPS + 1
LAST_STEP = FIRST_STEP + PROFILED_STEPS - 1


class StepProfiler:
    """Record a few steady optimizer steps. Every rank writes a trace of its own.

    PyTorch itself names the loader, the forwards of DP and DDP, each operation and its backward,
    collectives, and the optimizer. ``Precision`` names the forward.

    Args:
        run_dir: the trace is ``profile/rank<n>.json.gz`` in it.
        device: of this process.
        rank: of this process.
    """

    def __init__(self, run_dir: Path, device: torch.device, rank: int) -> None:
        self.run_dir, self.device, self.rank = run_dir, device, rank
        self.report = f"profile: too few steps, it takes {FIRST_STEP} or more"
        activities = [ProfilerActivity.CPU]
        if device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, device.type.upper()))
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it takes a missing GPU for an error
        # It waits for 5 steps, warms up for 2 and records 10, once.
        plan = schedule(wait=WARMUP_STEPS, warmup=SETTLING_STEPS, active=PROFILED_STEPS, repeat=1)
        self.profile = profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=self._export,
            # Without it the profiler follows this thread alone, and DP's replicas have their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        # A process of DP works on several devices. The time on this one counts.
        self.profile.preset_metadata_json("device", f'"{device}"')
        self.profile.start()

    def step(self) -> None:
        """Note the end of an optimizer step."""
        if self.profile.step_num + 1 in (FIRST_STEP - 1, LAST_STEP):
            synchronize(self.device)  # what is recorded begins and ends with an idle device
        self.profile.step()

    def finish(self) -> str:
        """End the recording, if the epoch did not outlast it, and return a line about it."""
        self.profile.stop()
        return self.report

    def _export(self, recorded: profile) -> None:
        folder, steps = self.run_dir / "profile", min(recorded.step_num, LAST_STEP) - FIRST_STEP + 1
        if steps > 0:
            folder.mkdir(parents=True, exist_ok=True)  # hosts may share no disk
            recorded.export_chrome_trace(str(folder / f"rank{self.rank}.json.gz"))
            show = f"python scripts/tools/trace.py {self.run_dir}"
            self.report = f"profile of {steps} steps in {folder}; where the time went: {show}"
