"""A trace of a few steady steps; scripts/tools/trace.py tells from it where their time went."""

import os
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from utils.device import synchronize

SKIPPED_STEPS = 5  # in which caches fill; the same that images/s leaves out
WARMUP_STEPS = 2  # in which the profiler itself settles
PROFILED_STEPS = 10  # enough to average, and a trace of some 100 KB
LAST_STEP = SKIPPED_STEPS + WARMUP_STEPS + PROFILED_STEPS


class StepProfiler:
    """Record a few steady optimizer steps of the first epoch; every rank leaves a trace.

    PyTorch names most of what happens by itself: the loader, the forwards of DP and DDP, each
    operation and its backward, collectives, the optimizer. The forward gets its name in the engine.

    Args:
        run_dir: ``profile/rank<n>.json.gz`` goes there.
        device: of this process.
        rank: of this process.
    """

    def __init__(self, run_dir: Path, device: torch.device, rank: int) -> None:
        self.run_dir, self.device, self.rank = run_dir, device, rank
        self.profile: profile | None = None
        self.steps = 0
        self.is_finished = False
        self.report = ""

    def step(self, steps: int) -> None:
        """Note that this process has now made so many optimizer steps; called after each batch."""
        if self.is_finished or steps == self.steps or steps > LAST_STEP:
            return
        self.steps = steps
        if self.profile is None:
            self.profile = _build_profile(self.device)
            self.profile.start()
        elif steps == LAST_STEP:
            self._stop()
        else:
            if steps == LAST_STEP - PROFILED_STEPS:
                synchronize(self.device)  # what is recorded begins and ends with an idle device
            self.profile.step()

    def finish(self, steps: int) -> None:
        """End the recording, if the epoch did not outlast it, and write the trace."""
        if self.is_finished:
            return
        self.is_finished = True
        least = LAST_STEP - PROFILED_STEPS + 1
        if self.steps < LAST_STEP:
            self._stop()
        if self.profile is None or steps < least:
            self.report = f"profile: {steps} steps are too few, it takes {least} or more"
            return
        path = self.run_dir / "profile" / f"rank{self.rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.profile.export_chrome_trace(str(path))
            self.report = (
                f"profile of {min(steps, LAST_STEP) - least + 1} steps in {path.parent}; where the"
                f" time went: python scripts/tools/trace.py {self.run_dir}"
            )
        except (OSError, ValueError) as error:
            self.report = f"profile: {path} could not be written ({error})"
        self.profile = None  # some memory

    def _stop(self) -> None:
        if self.profile is not None:
            synchronize(self.device)
            self.profile.stop()


def _build_profile(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it takes a missing GPU for an error
    recording = profile(
        activities=activities,
        # Started after the first step, which is one of those that are skipped.
        schedule=schedule(
            skip_first=SKIPPED_STEPS - 1,
            wait=0,
            warmup=WARMUP_STEPS,
            active=PROFILED_STEPS,
            repeat=1,
        ),
        # Without it the profiler follows this thread alone, and DP's replicas have their own.
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    # A process of DP works on several devices; this is the one whose time counts.
    recording.preset_metadata_json("device", f'"{device}"')
    return recording
