"""One rank of a check: a process that has torch loaded and forks for each script that it runs."""

import contextlib
import faulthandler
import os
import random
import re
import signal
import sys
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

try:  # each of these modules looks up the names of torch that it needs
    import bounds
    import devices
    import draws
    import files
    import lengths
    import numpy as np
    import passes
    import process_group
    import record
    import source
    import stand_ins
    import starts
    import steps
    import wrapper
    from record import state
except ModuleNotFoundError as error:
    MISSING = f"the check needs the package {error.name}, which is not installed here"
except (ImportError, AttributeError) as error:
    quoted = re.findall(r"'(\w+)'", str(error))  # of an import the first, of an object the last
    missing = quoted[0 if isinstance(error, ImportError) else -1]
    MISSING = f"this torch ({torch.__version__}) has no {missing}: the check knows 2.9 to 2.15"
else:
    MISSING = ""
    MODULES = [bounds, devices, draws, files, lengths, passes, process_group, record, source]
    MODULES += [stand_ins, starts, steps, wrapper]
FOLDER = os.path.dirname(os.path.abspath(__file__))
OWN_ERRORS = AttributeError | NameError | TypeError  # if the check itself raises them
OTHERS = {"SLURM_": "slurm", "OMPI_": "mpi", "PMI_": "mpi"}  # whose variables a script may want


def serve(connection: Connection) -> None:
    """Run one script after another, each in a process of its own."""
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            if MISSING:
                connection.send({"kind": "end", "how": "not judged", "message": MISSING})
            elif not os.fork():
                run(connection, request)
            else:
                os.wait()
            connection.send({"kind": "over"})


def launched(mode: str, port: int) -> dict[str, Any]:
    """Return the variables that a launcher gives to this rank."""
    local = state.rank % state.each
    if mode == "torchrun":
        return {
            "RANK": state.rank,
            "WORLD_SIZE": state.world,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": state.each,
            "GROUP_RANK": state.node,
            "NODE_RANK": state.node,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "check",
        }
    if mode == "slurm":
        return {
            "SLURM_PROCID": state.rank,
            "SLURM_NTASKS": state.world,
            "SLURM_NPROCS": state.world,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": state.node,
            "SLURM_NNODES": state.nodes,
            "SLURM_JOB_NUM_NODES": state.nodes,
            "SLURM_NTASKS_PER_NODE": state.each,
            "SLURM_TASKS_PER_NODE": state.each,
            "SLURM_GPUS_ON_NODE": state.each,
            "SLURM_NODELIST": "localhost",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOBID": 1,
            "SLURM_JOB_ID": 1,
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "SLURMD_NODENAME": "localhost",
        }
    sizes = {"RANK": state.rank, "SIZE": state.world, "LOCAL_RANK": local, "LOCAL_SIZE": state.each}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in sizes.items()} | {
        "PMI_RANK": state.rank,
        "PMI_SIZE": state.world,
    }


def run(connection: Connection, request: dict[str, Any]) -> NoReturn:
    """Run the script as this rank."""
    vars_of_state = request | {"connection": connection, "process": os.getpid()}
    for name, value in vars_of_state.items():
        setattr(state, name, value)
    state.began = time.time()
    state.each = state.world // state.nodes
    state.node = state.rank // state.each
    state.is_parent = state.mode == "spawn"
    out = os.open(f"{state.root}/.out{state.rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    files.confine()
    faulthandler.dump_traceback_later(0.9 * request["limit"])
    signal.alarm(int(request["limit"]) + 60)  # if nobody is left who would end this process
    variables = launched(state.mode, request["port"]) if state.mode != "spawn" else {}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["TMPDIR"] = state.root
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.chdir(os.path.join(state.root, request["folder"]))
    path, package = f"{state.root}/{request['script']}", request["package"]
    arguments = [item.replace("{node}", str(state.node)) for item in request["arguments"]]
    sys.argv = [path, *bounds.bounded_arguments(arguments)]
    sys.path[0] = os.getcwd() if package is not None else os.path.dirname(path)
    for replaced in MODULES:  # the script may have modules of these names
        del sys.modules[replaced.__name__]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__package__ = path, package
    os._exit = _leave  # type: ignore[assignment]
    _seed()
    try:
        exec(source.compiled(Path(path).read_bytes(), path), vars(main))
        starts.run_started()
    except SystemExit as leaving:
        _leave(leaving.code)
    except BaseException as error:
        _fail(error)
    _leave(0)


def _leave(code: Any) -> NoReturn:
    """End this process. A child that it has forked, as those of a Pool, is no rank."""
    if os.getpid() != state.process:
        record.exit_now(code if isinstance(code, int) else 0)
    if code in (None, 0):
        record.leave("ended")
    record.leave("error", message=f"it ended with exit status {code}")


def _seed() -> None:
    for seeding in (torch.seed, random.seed, np.random.seed):
        seeding()  # type: ignore[operator]


def _fail(error: BaseException) -> NoReturn:
    """Report an exception, with the script's own line. What it means is the verdict's affair."""
    traceback.print_exception(error)
    message, line = f"{type(error).__name__}: {error}"[:2000], ""
    if isinstance(error, ModuleNotFoundError):
        message = f"it needs the package {error.name}, which is not installed here"
    wanted = re.match("|".join(OTHERS), str(error.args[0])) if isinstance(error, KeyError) else None
    if wanted and state.mode == "torchrun":
        launcher = OTHERS[wanted[0]]
        asks = f"it asks for the variable {error.args[0]}: give --launcher {launcher}"
        record.again(state.world, launcher, asks)
    trace = traceback.extract_tb(error.__traceback__)
    if isinstance(error, OWN_ERRORS) and trace[-1].filename.startswith(FOLDER):
        message = f"the check itself fails with this torch ({torch.__version__}): {message}"
    for frame in trace:
        if frame.filename.startswith(state.root):
            line = f"{os.path.relpath(frame.filename, state.root)}:{frame.lineno}"
    calls = [item.calls for item in wrapper.wrappers]
    record.leave("error", message=message, calls=calls, line=line)


if __name__ == "__main__":
    if not MISSING:
        starts.before_a_rank += [_seed, devices.begin]
    serve(Connection(int(sys.argv[1])))
