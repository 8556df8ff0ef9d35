# The image that scripts/kubernetes/trainjob.yaml starts: a plain Python, PyTorch with the CUDA that it
# brings, and the project. The GPU driver is the machine's: at least 525 for CUDA 12, 580 for CUDA 13.
# PyTorch 2.15 brings CUDA 13, and has code for sm_75 and later. For older drivers or GPUs build with
#   --build-arg TORCH="torch<2.15 --index-url https://download.pytorch.org/whl/cu126"
#
#   docker build -t mnist-data-parallel .
#   docker run --gpus all --shm-size 1g --cap-add SYS_NICE -v "$PWD/runs:/project/runs" mnist-data-parallel
#
# Loader workers need /dev/shm, of which a container has 64 MB, and NCCL the memory that SYS_NICE
# allows. docs/launching.md says more.
FROM python:3.13-slim
# Which parts of the machine's driver the container sees: those for computing, and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /project
# The image has no C compiler: add one (apt-get install gcc) for --compile.
COPY requirements.txt ./
ARG TORCH=torch
RUN pip install --no-cache-dir $TORCH torchvision && pip install --no-cache-dir -r requirements.txt
COPY *.py ./
COPY utils utils
COPY scripts scripts
CMD ["torchrun", "--standalone", "--nproc_per_node", "gpu", "train_ddp.py"]
