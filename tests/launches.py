"""Every way to launch train_ddp.py, with the commands of docs/launching.md."""

from tests.documents import blocks, lines_of, read
from tests.processes import ROOT, finish, free_port, shell_line, start

SHORT = "--dataset synthetic --model linear --max-steps 20 --threads 1 --no-progress"


def launches():
    """Return the commands by the method that the comment above each one names.

    $HOST0 and $PORT are where rank 0 is, $NODE is the machine's number.
    """
    page = read(ROOT / "docs" / "launching.md")
    _, _, shown = page.partition("## Every way to launch it\n")
    found = {}
    for block in blocks(shown.partition("\n## ")[0]):
        for comment in block.text.split("# ")[1:]:
            method, command = comment.split("\n", 1)
            [found[method.partition(":")[0]]] = lines_of(command)
    return found


LAUNCHES = launches()
assert len(LAUNCHES) == 12


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
