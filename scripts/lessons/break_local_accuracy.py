"""Break it: the accuracy of one rank, and three wrong ways to make one out of many.

python scripts/lessons/break_local_accuracy.py
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from _lesson import conclude, first_line, run_ranks

CORRECT = (4, 1, 2)  # what each rank got right
COUNT = (4, 3, 3)  # of how many samples: 10 do not divide by 3
TRUE = sum(CORRECT) / sum(COUNT)


def work(rank: int, world_size: int) -> dict[str, Any]:
    correct, count = CORRECT[rank], COUNT[rank]
    average = torch.tensor(correct / count)
    dist.all_reduce(average)
    sums = torch.tensor([correct, count])
    returned: Any = dist.all_reduce(sums)  # works in place: the answer is in its argument
    try:
        assigned = str(returned / world_size)
    except TypeError as error:
        assigned = first_line(error)
    return {
        "its own correct / all samples": correct / sum(COUNT),
        "its own correct / its own count": correct / count,
        "mean of the ranks' accuracies": float(average) / world_size,
        "sum of correct / sum of counts": float(sums[0] / sums[1]),
        "assigned": assigned,
    }


def main() -> int:
    ranks = [outcome.value for outcome in run_ranks(work, 3)]
    print(f"ranks got {CORRECT} right of {COUNT}: {sum(CORRECT)} of {sum(COUNT)} = {TRUE:.1%}")
    for way in list(ranks[0])[:4]:
        print(f"  {way:31}" + "".join(f"   rank {r} {f[way]:6.1%}" for r, f in enumerate(ranks)))
    print(f"acc = dist.all_reduce(acc); acc / world_size: {ranks[0]['assigned']}")
    rank0 = ranks[0]
    return conclude(
        {
            "divided by the whole data set, one rank's share looks like an accuracy that falls "
            "with every device": rank0["its own correct / all samples"] < TRUE,
            "one rank's accuracy is that of its share": rank0["its own correct / its own count"]
            != TRUE,
            "a mean of accuracies is wrong where the shares differ in size": abs(
                rank0["mean of the ranks' accuracies"] - TRUE
            )
            > 0.01,
            "summed before they are divided, all ranks have the true one": all(
                abs(rank["sum of correct / sum of counts"] - TRUE) < 1e-6 for rank in ranks
            ),
            "all_reduce returns None": rank0["assigned"].startswith("TypeError")
            and "NoneType" in rank0["assigned"],
        }
    )


if __name__ == "__main__":
    sys.exit(main())
