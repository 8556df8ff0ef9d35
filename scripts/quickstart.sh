#!/usr/bin/env bash
# Train on one device, with DataParallel and with DDP, half an epoch each, and print the results
# side by side. Without a GPU, a core of the CPU is a device. With one GPU the cores are compared,
# since DataParallel and DDP need two devices, and the GPU stands beside them.
#
#   ./scripts/quickstart.sh [--data-dir DIR] [flag of the training scripts...]
#
# Uses the active Python if it has what requirements.txt asks for, and makes .venv otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
read_flags scripts/quickstart.sh "$@"

data_dir=data dataset='' kind=auto
for ((i = 0; i < ${#flags[@]}; i++)); do
    case ${flags[i]} in
        --data-dir) data_dir=${flags[i + 1]:-} ;;
        --data-dir=*) data_dir=${flags[i]#*=} ;;
        --dataset | --dataset=*) dataset=given ;;
        --device) kind=${flags[i + 1]:-auto} ;;
        --device=*) kind=${flags[i]#*=} ;;
    esac
done
[[ -n $data_dir ]] || fail "--data-dir wants a folder after it"

PYTHON=$(command -v python3 || true)
satisfied "$PYTHON" requirements.txt || make_environment requirements.txt
if [[ -z $dataset ]]; then
    say "Looking for MNIST in $data_dir, or downloading it..."
    if ! why=$("$PYTHON" scripts/tools/prepare_data.py mnist --data-dir "$data_dir" 2>&1); then
        say "${why#*error: }"$'\n'"Going on with drawn digits (--dataset synthetic) instead."
        flags+=(--dataset synthetic)
        "$PYTHON" scripts/tools/prepare_data.py synthetic --data-dir "$data_dir"
    fi
fi

run_dir=runs/quickstart-$(date +%Y%m%d-%H%M%S)
runs=()
# train NAME COMMAND...: run a training script, with the flags that all of them have.
train() {
    runs+=("$run_dir/$1")
    "${@:2}" --run-dir "$run_dir/$1" --epochs 0.5 "${flags[@]}"
}
launcher=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node)
single=("$PYTHON" train_single.py --batch-size 96)
dp=("$PYTHON" train_dp.py --batch-size 48)
ddp=("${launcher[@]}" 2 train_ddp.py --batch-size 48)
gpus=0
[[ $kind == cpu ]] || gpus=$(count_gpus "$PYTHON")
on_gpu=("${single[@]}" --devices 0) is_compared=true
if ((gpus > 1)); then
    device="a GPU" go_on=("${single[@]}" --run-dir "$run_dir/single")
    single+=(--devices 0) dp+=(--devices "0,1") ddp+=(--devices "0,1")
elif ((gpus == 1)) && [[ $kind != auto ]]; then
    device="a GPU" go_on=("${single[@]}" --run-dir "$run_dir/gpu") is_compared=false
else
    device="a core of the CPU" go_on=("${single[@]}" --run-dir "$run_dir/both-cores")
    ((gpus == 0)) || go_on=("${single[@]}" --run-dir "$run_dir/gpu")
    single+=(--device cpu --threads 1)
    dp+=(--device cpu --replicas 2 --threads 2)
    ddp+=(--device cpu --threads 1)
fi
say "Training for half an epoch each, always 96 images a step. A device is $device."
if ((gpus == 1)); then
    say "There is one GPU. DataParallel and DDP divide each batch among GPUs, so they need two."
    ! $is_compared || say "So they are compared on two cores of the CPU, and the GPU trains alone."
fi
# The CPU time of this shell and its programs. Other programs use the rest.
read -ra usage < <("$PYTHON" scripts/tools/compare.py --usage-of $$)

if $is_compared; then
    say $'\n'"One device: python train_single.py"
    train single "${single[@]}"
    say $'\n'"Two devices, DataParallel, one process: python train_dp.py"
    train dp "${dp[@]}"
    say $'\n'"Two devices, DDP, two processes: torchrun --standalone --nproc_per_node 2 train_ddp.py"
    # torchrun prints a banner if it sets this variable itself. The script divides the cores itself.
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} train ddp "${ddp[@]}"
fi
if ((gpus == 0)); then
    say $'\n'"Both cores without data parallelism: python train_single.py --threads 2"
    train both-cores "$PYTHON" train_single.py --batch-size 96 --device cpu --threads 2
elif ((gpus == 1)); then
    say $'\n'"The GPU: python train_single.py"
    train gpu "${on_gpu[@]}"
fi

"$PYTHON" scripts/tools/compare.py "${runs[@]}" --usage-of $$ --since "${usage[@]}"
[[ $PYTHON != "$VENV/bin/python" ]] || say $'\n'"Once in each shell:  source $VENV/bin/activate"
cat <<END

What next:
  see the curves    $PYTHON -m tensorboard.main --logdir $run_dir
  go on training    $(printf '%q ' "${go_on[@]}" "${flags[@]}")--epochs 3 --resume
  your own model    write it into my_network.py, and train it with --model my_network:MyNetwork
END
