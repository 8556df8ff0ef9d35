"""Short data sets: lengths are shortened where a data set tells its length, not where a loop ends.

So samplers share out a short epoch by their own rules, and the script's loops end by themselves.
"""

import functools
from typing import Any

import record
import torch.utils.data as data
from record import replaces, state

BATCH = 4
SAMPLES = 16  # of each rank in an epoch: four whole batches
whole_lengths = record.Nested()  # while data sets tell them


def shorter(length: int) -> int:
    """Return a length that divides by the number of ranks exactly if the given one does."""
    most = SAMPLES * state.world
    return length if length <= most or whole_lengths.depth else most - (-length % state.world)


@replaces(data, data.dataset)
def random_split(real: Any, dataset: Any, lengths: Any, *args: Any, **keywords: Any) -> Any:
    """Split by the lengths that were written, or by those that followed from a short length."""
    lengths, short = list(lengths), len(dataset)
    if sum(lengths) == short and min(lengths) >= 0:
        return real(dataset, lengths, *args, **keywords)
    with whole_lengths:
        if sum(lengths) == short:  # such as 55000 and what is left
            lengths[-1] += len(dataset) - short
        return real(dataset, lengths, *args, **keywords)


def _shorten(kind: Any) -> None:
    if real := vars(kind).get("__len__"):
        kind.__len__ = functools.wraps(real)(lambda self: shorter(real(self)))
    for child in kind.__subclasses__():
        _shorten(child)


def _subclasses(cls: Any, **keywords: Any) -> None:
    super(data.Dataset, cls).__init_subclass__(**keywords)
    _shorten(cls)


data.Dataset.__init_subclass__ = classmethod(_subclasses)  # type: ignore[assignment]
_shorten(data.Dataset)
