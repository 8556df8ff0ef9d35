"""Run a command on a number of pretended GPUs, which are built first if need be. See README.md.

    python tests/pretended_gpus/run.py 2 python -m pytest -m gpu

If this machine, or its PyTorch, is not made for it, one line says why, and the status is 77.
"""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
CUDA = [SITE / "nvidia/cu13/include", SITE / "triton/backends/nvidia/include"]
NCCL = SITE / "nvidia/nccl/include"
FITS = "2.15"  # the version of PyTorch whose calls of CUDA are simulated
SKIPPED = 77  # the exit status that automake uses for it, too

# Which functions of CUDA's libraries a library of PyTorch needs.
NEEDED = re.compile(r"^ +U ((?:__cuda|cuda|cupti|cu[A-Z]|nccl)\w*)", re.MULTILINE)
STUB = 'extern "C" __attribute__((weak)) int {name}() {{ {body} }}\n'
FAILS = 'say("{name} is not simulated"); return {error};'
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED and cudaErrorNotSupported

# PyTorch calls this at the end of `import torch`, as it does for any backend that is installed.
ENTRY_POINT = "[torch.backends]\npretended_gpus = pretended_gpus:load\n"
LOADER = """
import ctypes
import torch._native  # so that the operations that it replaces are replaced once more

def load():
    ctypes.CDLL(__file__.replace("pretended_gpus.py", "operations.so")).pretend_operations()
"""


def skip(reason: str) -> None:
    print(f"Pretended GPUs cannot be had here: {reason}", file=sys.stderr)
    sys.exit(SKIPPED)


def installed_torch() -> str:
    """Return the version of PyTorch. If this machine cannot build for it, end with the reason."""
    file = SITE / "torch/version.py"
    if not file.exists():
        skip(f"{sys.executable} has no torch")
    version = runpy.run_path(str(file))
    name = f"torch {version['__version__']} with CUDA {version['cuda']}"
    if not version["cuda"]:
        skip("torch is a build for CPUs")
    if not version["__version__"].startswith(f"{FITS}.") or not version["cuda"].startswith("13."):
        skip(f"they are made for torch {FITS} with CUDA 13, and this is {name}")
    for program in ("g++", "nm"):
        if not shutil.which(program):
            skip(f"there is no {program} (Debian's package is called build-essential)")
    for folder, header in ((CUDA[0], "cuda.h"), (CUDA[1], "cuda.h"), (NCCL, "nccl.h")):
        if not (folder / header).exists():
            skip(f"the headers of CUDA are not at {folder}, where pip puts them")
    return name


def stubs() -> str:
    """Return a program with each function of CUDA that PyTorch is linked to.

    They are weak: a function in runtime.cpp, nccl.cpp or driver.cpp takes precedence.
    """
    libraries = map(str, sorted((SITE / "torch/lib").glob("lib*.so")))
    command = ["nm", "--dynamic", "--undefined-only", *libraries]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    program = "void say(const char*, ...);\n"
    for name in sorted({*NEEDED.findall(symbols)}):
        records_nothing = "return 0;"
        fails = FAILS.format(name=name, error=NOT_SUPPORTED)
        body = records_nothing if name.startswith("cupti") else fails
        program += STUB.format(name=name, body=body)
    return program


def elementwise() -> str:
    """Return a header with the operations that check the devices of their arguments themselves."""
    file = SITE / "torchgen/packaged/ATen/native/native_functions.yaml"
    found = []
    for entry in re.split(r"^- func: ", file.read_text(), flags=re.MULTILINE)[1:]:
        if "device_check: NoCheck" in entry:
            found.append(f'"aten::{entry.partition("(")[0]}",\n')
    return f"static const std::set<std::string> ELEMENTWISE{{\n{''.join(found)}}};\n"


def build(folder: Path) -> None:
    """Compile the two libraries into a folder."""
    (folder / "stubs.cpp").write_text(stubs())
    (folder / "elementwise.h").write_text(elementwise())
    (folder / "pretended_gpus.py").write_text(LOADER)
    (folder / "pretended_gpus.dist-info").mkdir()
    (folder / "pretended_gpus.dist-info/entry_points.txt").write_text(ENTRY_POINT)
    torch = SITE / "torch/include"
    headers = [folder, *CUDA, NCCL, torch, torch / "torch/csrc/api/include"]
    compiler = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-DUSE_CUDA", "-Wall"]
    compiler += [f"-isystem{each}" for each in headers]
    cuda = [HERE / "runtime.cpp", HERE / "nccl.cpp", HERE / "driver.cpp", folder / "stubs.cpp"]
    operations = [HERE / "operations.cpp", HERE / "batch_norm.cpp"]
    libraries = [f"-L{SITE}/torch/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    jobs = [
        # Libraries look for the driver by this name, while they run.
        [*compiler, "-Wl,-soname,libcuda.so.1", *cuda, "-o", folder / "cuda.so"],
        [*compiler, *operations, "-o", folder / "operations.so", *libraries],
    ]
    started = [subprocess.Popen([*map(str, job)]) for job in jobs]
    statuses = [process.wait() for process in started]
    if any(statuses):
        sys.exit("Pretended GPUs: the compiler failed")


def built(name: str) -> Path:
    """Return the folder of the build for this PyTorch and these sources."""
    sources = [file for file in sorted(HERE.iterdir()) if file.suffix in (".cpp", ".h", ".py")]
    content = b"".join(file.read_bytes() for file in sources) + name.encode()
    folder = HERE / ".build_cache" / hashlib.sha256(content).hexdigest()[:16]
    if folder.exists():
        return folder
    print(f"Building pretended GPUs for {name}: half a minute", file=sys.stderr)
    unfinished = folder.with_suffix(f".{os.getpid()}")
    unfinished.mkdir(parents=True)
    build(unfinished)
    unfinished.rename(folder)
    return folder


def main() -> None:
    if len(sys.argv) < 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    folder = built(installed_torch())
    os.environ["PRETEND_GPUS"] = sys.argv[1]
    os.environ["LD_PRELOAD"] = str(folder / "cuda.so")
    for name, first in (("PATH", HERE), ("PYTHONPATH", folder)):  # nvidia-smi, and the loader
        others = os.environ.get(name)
        os.environ[name] = f"{first}:{others}" if others else str(first)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
