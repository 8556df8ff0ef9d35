"""Every way to launch train_ddp.py: the commands of the documents' table."""

from tests.documents import rows, section
from tests.processes import ROOT, finish, free_port, shell_line, start

SHORT = "--dataset synthetic --model linear --max-steps 20 --threads 1 --no-progress"


# The commands by method. $HOST0 and $PORT are where rank 0 is, $NODE is the machine's number.
TABLE = rows(section(ROOT / "docs" / "launching.md", "Every way to launch it").text)[1:]
LAUNCH_TABLE = {method: code.strip("`") for method, code, _ in TABLE}
assert len(LAUNCH_TABLE) >= 12


def launch(command, flags, literal=True, **extra):
    """Start a command with flags at its end, once for each of its machines, all on this one.

    Args:
        literal: by a shell; otherwise the same processes are forked.
    """
    known = {"HOST0": "127.0.0.1", "PORT": str(free_port())} | extra
    processes = []
    for node in range(2 if "$HOST0" in command else 1):
        words, variables = ["bash", "-c", f"{command} {flags}"], known | {"NODE": str(node)}
        if not literal:
            words, variables = shell_line(words[-1], **variables)
        processes.append(start(*words, **variables))
    return processes


def finish_all(processes, timeout):
    return [finish(process, timeout) for process in processes]
