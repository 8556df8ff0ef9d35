"""Two machines with two processes each: which number has each process, and who tells it?

Two launchers on this machine play two machines, with `--node_rank 0` and `--node_rank 1`. torchrun
sets the numbers as environment variables. The second process of the second machine has

a) RANK=1 and LOCAL_RANK=1.
b) RANK=3 and LOCAL_RANK=1.
c) RANK=3 and LOCAL_RANK=3.

`python -m torch.distributed.launch`, which is deprecated, sets the same variables. Without
`--use_env` it also passes `--local-rank` to the script, and a script that does not know this flag
ends with `unrecognized arguments`. With several machines the launchers need machine 0's address and
a port. If you leave them out, they are 127.0.0.1 and 29500, where the other machines find nobody.
With one machine, the launcher of torch 2.15 chooses a free port.

Three machines with 8 processes each have ranks 0 to 23, and node_rank is 0, 1 or 2. torchrun does
not refuse a node_rank of 5: it waits, and so do the others.
"""

import os
import subprocess
import sys
import tempfile

import _lesson as lesson

# One call prints the line, so that lines of several ranks do not mix.
SCRIPT = """import os, sys
names = ("GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR")
numbers = [f"{name}={os.environ[name]}" for name in names]
sys.stdout.write(f"{' '.join(numbers)} arguments={sys.argv[1:]}\\n")
"""
NNODES = 2
NPROC_PER_NODE = 2

lesson.start(__doc__, answer="b")
port = lesson.free_port()
machines = f"--nnodes {NNODES} --nproc_per_node {NPROC_PER_NODE} --master_port {port}".split()
commands = {
    "torchrun, machine 0": ["torch.distributed.run", *machines, "--node_rank", "0"],
    "torchrun, machine 1": ["torch.distributed.run", *machines, "--node_rank", "1"],
    "torch.distributed.launch": ["torch.distributed.launch"],
}
environment = os.environ | {"OMP_NUM_THREADS": "1"}  # or torchrun prints a warning
with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
    script.write(SCRIPT)
    script.flush()
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *command, script.name],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands.values()
    ]
    try:
        outputs = [process.communicate(timeout=100)[0].decode() for process in started]
    finally:
        for process in started:
            process.kill()
lines = []
for title, output in zip(commands, outputs, strict=True):
    lines.append(sorted(line for line in output.splitlines() if "RANK=" in line))
    print(f"{title}:", *lines[-1], sep="\n  ")

assert len(lines[0] + lines[1]) == 4, outputs
# rank = node_rank * nproc_per_node + local rank. node_rank is the number of the machine.
for rank, line in enumerate(lines[0] + lines[1]):
    node_rank, local_rank = divmod(rank, NPROC_PER_NODE)
    assert f"GROUP_RANK={node_rank} LOCAL_RANK={local_rank} RANK={rank} WORLD_SIZE=4 " in line
    # Nobody gave an address, so machine 1 would look for machine 0 on itself.
    assert "MASTER_ADDR=127.0.0.1" in line
# The older launcher sets LOCAL_RANK, and passes it as a flag besides.
assert "LOCAL_RANK=0" in lines[2][0]
assert "--local-rank=0" in lines[2][0]

lesson.claim("rank = node_rank * nproc_per_node + local rank; world size = nnodes * nproc_per_node")
