"""Run a script as one rank, with stand-ins for what is not here."""

import argparse
import ast
import contextlib
import copy
import faulthandler
import importlib.machinery as machinery
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import files
import loaders
import pretend
import project
import reading
import record
import torch.multiprocessing as mp
import training
from record import replaces, state

FOREIGN = "deepspeed|horovod|colossalai"  # others are refused when they wrap a model
LOOKS = re.compile(r"(.* and \(?)?not \S*(exists|is_?dir|is_?file)\((?!.*\b(and|or)\b)")
MAKES = re.compile(r"(os\.makedirs|makedirs|.*\.mkdir)\((?!.*exist_ok)")
_started: list[BaseProcess] = []  # processes that the script has started: each is a rank
_makes_groups: list[str] = []  # files of the project that call init_process_group


def launched(port: int) -> dict[str, str]:
    """Return the variables that launchers give to this rank: torchrun, or all of them."""
    values = {
        "RANK SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK": state.rank,
        "WORLD_SIZE SLURM_NTASKS SLURM_NPROCS OMPI_COMM_WORLD_SIZE PMI_SIZE": state.world,
        "LOCAL_RANK SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK": state.rank % state.each,
        "LOCAL_WORLD_SIZE SLURM_NTASKS_PER_NODE OMPI_COMM_WORLD_LOCAL_SIZE": state.each,
        "GROUP_RANK NODE_RANK SLURM_NODEID": state.node,
        "SLURM_NNODES SLURM_JOB_NUM_NODES": state.nodes,
        "SLURM_GPUS_ON_NODE": state.each,
        "MASTER_ADDR SLURM_NODELIST SLURM_JOB_NODELIST SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID SLURM_JOB_ID SLURM_JOBID": 1,
    }
    found = {name: str(value) for names, value in values.items() for name in names.split()}
    others = ("SLURM", "OMPI", "PMI") if state.mode != "all" else ()
    return {name: value for name, value in found.items() if not name.startswith(others)}


def run(request: dict[str, Any]) -> NoReturn:
    """Run the script as this rank."""
    own = {"process": os.getpid(), "changed": project.changed, "began": time.time()}
    for name, value in (request | own).items():
        setattr(state, name, value)
    state.each = state.world // state.nodes
    state.node = state.rank // state.each
    state.is_parent = state.mode == "spawn"
    state.told = open(f"{state.root}/.told{state.rank}", "w", buffering=1)  # noqa: SIM115
    project.bound(state.world, request["is_small"])
    # If this process aborts, as Gloo lets it for tensors of other sizes, this file shows where.
    faulthandler.enable(open(f"{state.root}/.stack{state.rank}", "w"))  # noqa: SIM115
    files.confine()
    signal.signal(signal.SIGALRM, lambda *args: record.leave("time"))  # with what was seen
    signal.setitimer(signal.ITIMER_REAL, max(request["until"] - time.time(), 0.1))
    os.environ.update(launched(request["port"]) if state.mode != "spawn" else {})
    os.environ["TMPDIR"] = tempfile.tempdir = state.root
    shown = request["visible"]  # by the user, who may have fewer GPUs than ranks
    if shown and len(shown.split(",")) >= state.each:
        os.environ["CUDA_VISIBLE_DEVICES"] = shown
    else:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    os.chdir(os.path.join(state.root, request["folder"]))
    path = f"{state.root}/{request['script']}"
    package = request["package"]
    # C libraries write where an absolute path leads, so it has to lead into the copy.
    given = [text.replace("{node}", str(state.node)) for text in request["arguments"]]
    arguments = [text.replace(f"{state.home}/", f"{state.root}/") for text in given]
    sys.argv = [path, *project.bounded_arguments(arguments)]
    sys.path[0] = os.getcwd() if package is not None else os.path.dirname(path)
    for at, folder in enumerate(sys.path):  # of PYTHONPATH, or of a project installed in place
        twin = os.path.join(state.root, os.path.relpath(folder, request["home"]))
        if Path(folder).is_relative_to(request["home"]) and os.path.isdir(twin):
            sys.path[at] = twin
    for module in (project, reading, record, files, pretend, loaders, training):
        del sys.modules[module.__name__]  # the script may have modules of these names
    if guard := re.search("^if __name__", text := project.text_of(Path(path)), re.M):
        state.guard = text.count("\n", 0, guard.start()) + 1
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__package__ = path, package
    if state.is_parent:  # each rank plays the parent of all, so all have to draw alike in it
        _seed(0)
    try:
        exec(compiled(Path(path).read_bytes(), path), vars(main))
        _run_started()
    except SystemExit as leaving:
        _leave_with(leaving.code)
    except BaseException as error:
        _fail(error)
    record.leave("ended")


def _leave_with(status: Any) -> NoReturn:
    if status in (None, 0):
        record.leave("ended")
    record.leave("error", message=f"it ended with exit status {status}", line="")


@replaces(os)
def _exit(real: Any, status: int) -> None:
    _leave_with(status) if os.getpid() == state.process else real(status)


def _seed(seed: int) -> None:
    for name, (*_, owner, seeding) in loaders.GENERATORS.items():
        if name not in loaders.imported:
            getattr(owner, seeding)(seed)
            loaders.seeds.pop(name, None)


def _fail(error: BaseException) -> NoReturn:
    """Report an exception, with the script's own line. The verdict decides what it means."""
    traceback.print_exception(error)
    trace = traceback.extract_tb(error.__traceback__)
    while error.__cause__:  # "Failed to run ..." says nothing
        error = error.__cause__
    message, line = f"{type(error).__name__}: {error}"[:2000], ""
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        where = f"in the installed {package}" if package in sys.modules else "installed here"
        message = f"it needs {error.name}, which is not {where}"
    how = "waited" if re.search("gloo|onnection (closed|reset)|timed out", message) else "error"
    for frame in trace:
        if frame.filename.startswith(state.root):
            line = record.place(frame.filename, frame.lineno)
    record.leave(how, message=message, line=line)


def compiled(data: Any, path: str) -> types.CodeType:
    """Compile a file of the script, with its numbers bounded."""
    text = importlib.util.decode_source(data)
    if "init_process_group" in text:
        _makes_groups.append(path)
        record.tell("asks for a group")
    record.tell("code", path=os.path.relpath(path, state.root))
    if found := re.search(rf"^(?:import|from) ({FOREIGN})\b", text, re.M):
        record.leave("not judged", message=f"it uses {found[1]}, which is not judged")
    for node in ast.walk(ast.parse(text, path)) if "def makedirs" not in text else ():
        if isinstance(node, ast.If) and LOOKS.match(ast.unparse(node.test)):
            made = [one.lineno for one in node.body if MAKES.match(ast.unparse(one))]
            files.looks |= {record.place(path, node.lineno)} if made else set()
            files.makes |= {record.place(path, line) for line in made}
    return compile(project.bounded_code(text), path, "exec", dont_inherit=True)


def _run_started(processes: list[Any] | None = None) -> None:
    """Be one of the processes that the script starts. Rank 0 is their parent afterwards, too."""
    processes = processes or list(_started)
    _started.clear()
    if not processes:
        return
    if state.mode != "spawn" or len(processes) != state.each:
        record.again(len(processes) * state.nodes, "spawn")
    if state.groups:  # such as for another part of a cross-validation: the other ranks have ended
        record.leave("cut", message="what follows after its processes: it started some again")
    state.is_parent = False
    _seed(1000 + int.from_bytes(os.urandom(3)))
    processes[state.rank % state.each].run()
    if state.rank:
        record.leave("ended")
    state.is_parent = True


@replaces(machinery.SourceFileLoader)
def source_to_code(real: Any, self: Any, data: Any, path: Any, **keywords: Any) -> Any:
    is_script = str(path).startswith(state.root)
    return compiled(data, str(path)) if is_script else real(self, data, path, **keywords)


@replaces(argparse.ArgumentParser)
def parse_known_args(real: Any, self: Any, args: Any = None, namespace: Any = None) -> Any:
    args = list(sys.argv[1:] if args is None else args)
    for spelled in ("--local_rank", "--local-rank") if state.mode == "torchrun" else ():
        option = self._option_string_actions.get(spelled)
        if option and not {str(a).partition("=")[0] for a in args} & {*option.option_strings}:
            args.insert(0, f"{spelled}={state.rank % state.each}")  # as torch.distributed.launch
    found, rest = real(self, args, namespace)
    for name, value in vars(found).items():
        setattr(found, name, project.bounded(name, value))
    return found, rest


@replaces(os)
def get_terminal_size(real: Any, *args: Any) -> os.terminal_size:
    return os.terminal_size((80, 24))


def _spawn(real: Any, fn: Any, args: Any = (), nprocs: int = 1, *a: Any, **keywords: Any) -> Any:
    """Be the rank of this number, in place of ``mp.spawn``. It has no handlers of its parent."""
    logging.root.handlers.clear()
    _run_started([mp.Process(target=fn, args=(index, *args)) for index in range(nprocs)])
    return types.SimpleNamespace(join=lambda *args, **keywords: True, processes=[])


for _name in ("spawn", "start_processes"):
    replaces(mp, sys.modules["torch.multiprocessing.spawn"], name=_name)(_spawn)


def _kept(argument: Any) -> Any:
    """Return a copy of what a process gets, since the script may change it for the next one."""
    with contextlib.suppress(Exception):  # a queue has none
        return copy.copy(argument)
    return argument


@replaces(BaseProcess)
def start(real: Any, self: Any) -> None:
    """Start a helper. A rank waits until all of them are known."""
    by_script = sys._getframe(2).f_code.co_filename.startswith(state.root)
    if state.groups or not by_script or not _makes_groups or self.daemon:
        return real(self)
    self._popen = pretend.Stub(**{"poll.return_value": 0})
    self._args = tuple(map(_kept, self._args))
    _started.append(self)


@replaces(BaseProcess)
def join(real: Any, self: Any, timeout: Any = None) -> None:
    _run_started()
    real(self, timeout)


sys.dont_write_bytecode = True
if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
