# hf-ext with all extras, on CPUs. The base is named by its digest, so that the same file makes the same image; a tag can
# be moved to another. This one is python:3.11-slim of July 2026; `docker buildx imagetools inspect python:3.11-slim`
# prints that of today, for --build-arg DIGEST=sha256:….
# docker build -t hf-ext . && docker run --rm --user "$(id -u)" -v "$PWD:/work" hf-ext restore denoise-color photo.jpg --out restored
# For GPUs begin with an image that has PyTorch, --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime and the
# digest of that: its torch is kept.
ARG BASE=python:3.11-slim
ARG DIGEST=sha256:db3ff2e1800a8581e2c48a27c3995339d47bdf046da21c7627accd3d51053a93
FROM ${BASE}@${DIGEST}
COPY . /hf-ext
WORKDIR /hf-ext
RUN python -c "import torch" 2>/dev/null || pip install --no-cache-dir -c constraints.txt torch
# The tested versions of all else; the torch of the base may be another.
RUN grep -v "^torch==" constraints.txt > tested.txt && pip install --no-cache-dir -c tested.txt ".[all]" && rm -rf build tested.txt
# No command needs root. With --user the results belong to whoever calls; any user may write to the caches.
ENV HOME=/tmp
USER 1000
WORKDIR /work
ENTRYPOINT ["hf-ext"]
CMD ["--help"]
