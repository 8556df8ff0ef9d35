# The image that scripts/kubernetes/trainjob.yaml starts: PyTorch's own with CUDA, and the project.
#
#   docker build -t mnist-data-parallel .
#   docker run --gpus all --shm-size 1g -v "$PWD/runs:/project/runs" mnist-data-parallel
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
WORKDIR /project
COPY requirements.txt ./
# The image's Python may belong to a distribution, which pip would refuse. The image has no C compiler:
# add one (apt-get install gcc) for --compile.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir -r requirements.txt
COPY *.py ./
COPY utils utils
COPY scripts scripts
CMD ["torchrun", "--standalone", "--nproc_per_node", "gpu", "train_ddp.py"]
