"""Run the script's own files and commands with bounded numbers, and without other frameworks."""

import argparse
import importlib.machinery as machinery
import importlib.util
import re
import sys
import types
from typing import Any

import bounds
import record
from record import replaces, state

FOREIGN = "pytorch_lightning|lightning|accelerate|deepspeed|horovod|colossalai|ray"


def compiled(data: Any, path: str) -> types.CodeType:
    """Compile a file of the script, with its numbers bounded."""
    text = importlib.util.decode_source(data)
    if found := re.search(rf"^(?:import|from) ({FOREIGN})\b", text, re.M):
        record.leave("not judged", message=f"it uses {found[1]}, which is not judged")
    return compile(bounds.bounded_code(text), path, "exec", dont_inherit=True)


@replaces(machinery.SourceFileLoader)
def source_to_code(real: Any, self: Any, data: Any, path: Any, **keywords: Any) -> Any:
    is_script = str(path).startswith(state.root)
    return compiled(data, str(path)) if is_script else real(self, data, path, **keywords)


@replaces(argparse.ArgumentParser)
def parse_known_args(real: Any, self: Any, args: Any = None, namespace: Any = None) -> Any:
    args = list(sys.argv[1:] if args is None else args)
    passed = {str(item).partition("=")[0] for item in args}
    for spelled in ("--local_rank", "--local-rank") if state.mode == "torchrun" else ():
        option = self._option_string_actions.get(spelled)
        if option and not passed.intersection(option.option_strings):
            args.append(f"{spelled}={state.rank % state.each}")
    found, rest = real(self, args, namespace)
    vars(found).update({name: bounds.bounded(name, value) for name, value in vars(found).items()})
    return found, rest


sys.dont_write_bytecode = True
