#!/usr/bin/env bash
# Train on one device, with DataParallel and with DDP, half an epoch each, and compare them. A device
# is a GPU, of which two are used if there are two. Without a GPU it is a core of the CPU.
#
#   ./scripts/quickstart.sh [flag of the training scripts...]
#
# Uses the active Python if it has what requirements.txt asks for, and makes .venv otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

PYTHON=python3
satisfied "$PYTHON" requirements.txt || make_environment requirements.txt

# How many GPUs are there, and is there MNIST, or can it be downloaded?
found=$("$PYTHON" - "$@" <<'END'
import argparse, sys
import torch
sys.path.insert(0, "")
import data
from utils.errors import UsageError

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--dataset", default="mnist")
parser.add_argument("--data-dir", default="data")
args, _ = parser.parse_known_args()
try:
    data.load(args.dataset, args.data_dir)
except UsageError as error:
    print(f"{error}\nGoing on with drawn digits: --dataset synthetic", file=sys.stderr)
    args.dataset = "synthetic"
print(torch.cuda.device_count(), args.dataset)
END
)
read -r gpus dataset <<<"$found"
devices=$((gpus == 1 ? 1 : 2)) where=() dp=()
((gpus > 0)) || where=(--device cpu --threads 1)
# On CPU cores, or one GPU, nn.DataParallel has one device, and only calls the model.
((gpus < 2)) || dp=(--devices "0,1")
folder=runs/quickstart-$(date +%Y%m%d-%H%M%S)
torchrun=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or torchrun says that it sets it

# train NAME COMMAND...: run a training script with the flags that all of them have.
train() {
    printf '\n%s\n' "${*:2}"
    "${@:2}" --run-dir "$folder/$1" --max-steps 312 "${where[@]}" "${flags[@]}"
}
flags=("$@" --dataset "$dataset")
train single "$PYTHON" train_single.py --batch-size 96
train dp "$PYTHON" train_dp.py --batch-size $((gpus > 1 ? 48 : 96)) "${dp[@]}"
train ddp "${torchrun[@]}" "$devices" train_ddp.py --batch-size $((96 / devices))
echo
"$PYTHON" scripts/tools/benchmark.py --runs "$folder"/{single,dp,ddp}

launcher="torchrun --standalone --nproc_per_node $((gpus > 0 ? gpus : 2))"
cat <<END

What next:
$([[ $PYTHON == python3 ]] || echo "  once in each shell    source $VENV/bin/activate")
  a whole epoch         $launcher train_ddp.py --dataset $dataset
  your own model        $launcher train_ddp.py --model my_network:MyNetwork
  the curves            tensorboard --logdir $folder
  which one is faster   python scripts/tools/benchmark.py
END
