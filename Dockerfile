# An image with the project and PyTorch with CUDA, which needs a machine with a GPU driver.
#
#   docker build -t mnist-data-parallel .
#   mkdir -p runs data
#   docker run --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD/runs:/project/runs" \
#       -v "$PWD/data:/project/data" mnist-data-parallel
#
# For your own script, which lies in this folder:
#   docker run --gpus all --shm-size 1g --user "$(id -u):$(id -g)" -v "$PWD:/mine" -w /mine \
#       mnist-data-parallel torchrun --standalone --nproc_per_node gpu my_script.py
#
# Loader workers and NCCL use /dev/shm, of which a container has 64 MB by default. Without --user the
# files belong to root. An old driver or GPU needs another build of torch, such as
#   --build-arg TORCH="torch<2.15 --index-url https://download.pytorch.org/whl/cu126"
FROM python:3.13-slim
WORKDIR /project
# torch.compile needs a C++ compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -r /var/lib/apt/lists/*
COPY requirements.txt ./
ARG TORCH=torch
RUN pip install --no-cache-dir $TORCH torchvision && pip install --no-cache-dir -r requirements.txt
COPY *.py ./
COPY utils utils
COPY scripts scripts
CMD ["torchrun", "--standalone", "--nproc_per_node", "gpu", "train_ddp.py"]
