"""Random numbers: which states they were drawn from, and checksums of what was drawn or read."""

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import record
import torch

GENERATORS: dict[str, tuple[Any, Any]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
}


def digest(value: Any) -> int:
    """Return a checksum of what data sets return. It is 0 for a kind that nobody knows."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().numpy()
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        # Python's generator has 625 integers. As one text they take a tenth of the time.
        are_integers = all(type(item) is int for item in value)
        value = str(value if are_integers else [digest(item) for item in value])
    if hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    plain = isinstance(value, int | float | str | bytes | None)
    return zlib.crc32(repr(value).encode()) if plain else 0


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an argument, or in what a data set returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    is_several = isinstance(value, dict | list | tuple)
    return [tensor for item in values for tensor in tensors_of(item)] if is_several else []


def marks() -> dict[str, int]:
    """Return a checksum of the state of each random generator."""
    return {name: digest(get()) for name, (get, _) in GENERATORS.items()}


def tell_draws(where: str, before: dict[str, int], seed: int | None = None) -> None:
    """Tell from which states numbers were drawn since: equal states draw equal numbers."""
    for name, after in marks().items():
        if after != before[name]:
            mark = before[name] if seed is None else seed
            record.tell("equal random numbers", same=(where, name, mark), where=where, name=name)


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    """Give the generators their states back at the end of a block."""
    states = [(put, get()) for get, put in GENERATORS.values()]
    try:
        yield
    finally:
        for put, state in states:
            put(state)
