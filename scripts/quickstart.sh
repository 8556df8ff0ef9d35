#!/usr/bin/env bash
# From nothing to the comparison: train on one device, with DataParallel and with DDP, and print
# the three side by side.
#
#   ./scripts/quickstart.sh [--data-dir DIR] [flag of the training scripts...]
#
# Uses the active Python where it has what requirements.txt asks for, and makes .venv otherwise.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

PYTHON=$(command -v python3 || true)
if ! satisfied "$PYTHON" requirements.txt; then
    make_environment requirements.txt
fi

data_dir=data
flags=("$@")
for ((i = 0; i < ${#flags[@]}; i++)); do
    case ${flags[i]} in
        --data-dir) data_dir=${flags[i + 1]:-data} ;;
        --data-dir=*) data_dir=${flags[i]#*=} ;;
        --dataset | --dataset=*) dataset_given=1 ;;
    esac
done
if [[ -z ${dataset_given:-} ]]; then
    say "Looking for MNIST in $data_dir, or downloading it..."
    if ! why=$("$PYTHON" scripts/tools/prepare_data.py mnist --data-dir "$data_dir" 2>&1); then
        say "${why#*error: }" "Going on with drawn digits (--dataset synthetic) instead."
        flags+=(--dataset synthetic)
        "$PYTHON" scripts/tools/prepare_data.py synthetic --data-dir "$data_dir"
    fi
fi

# Two devices of a kind: two GPUs, or two shares of the CPU.
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus >= 2)); then
    where="two GPUs"
    dp=(--devices "0,1")
    ddp=(--devices "0,1")
    single=(--devices 0)
else
    where="the CPU's cores"
    single=(--device cpu)
    dp=(--device cpu --replicas 2)
    ddp=(--device cpu)
fi
run_dir=runs/quickstart-$(date +%Y%m%d-%H%M%S)
say "Training for one epoch each on $where, always 96 images a step."
# What this shell and its programs use of the CPU: the rest is other programs'.
read -ra usage < <("$PYTHON" scripts/tools/compare.py --usage-of $$)

say "" "1. One device: python train_single.py"
"$PYTHON" train_single.py --run-dir "$run_dir/single" --batch-size 96 "${single[@]}" "${flags[@]}"
say "" "2. DataParallel, one process: python train_dp.py"
"$PYTHON" train_dp.py --run-dir "$run_dir/dp" --batch-size 48 "${dp[@]}" "${flags[@]}"
say "" "3. DistributedDataParallel, two processes: torchrun --standalone --nproc_per_node 2 train_ddp.py"
# torchrun warns that it sets this; the script shares out the cores itself (--threads).
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$PYTHON" -m torch.distributed.run --standalone --nproc_per_node 2 \
    train_ddp.py --run-dir "$run_dir/ddp" --batch-size 48 "${ddp[@]}" "${flags[@]}"

"$PYTHON" scripts/tools/compare.py "$run_dir"/{single,dp,ddp} --usage-of $$ --since "${usage[@]}"
[[ $PYTHON != "$VENV/bin/python" ]] || say "" "Once in each shell:  source $VENV/bin/activate"
cat <<END

What next:
  see the curves    $PYTHON -m tensorboard.main --logdir $run_dir
  go on training    $PYTHON train_single.py --run-dir $run_dir/single --batch-size 96 ${single[*]} ${flags[*]} --epochs 3 --resume
  your own model    add a line to MODELS in models.py, and train it with --model NAME
END
