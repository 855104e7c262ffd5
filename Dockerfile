# hf-ext with all extras, on CPUs. The base is named by its digest, so that the same file makes the same image; a tag can
# be moved to another. `docker buildx imagetools inspect python:3.11-slim` prints the digest of today, as "Digest: sha256:…".
# docker build -t hf-ext --build-arg DIGEST=sha256:… . && docker run --rm --user "$(id -u)" -v "$PWD:/work" hf-ext restore denoise-color photo.jpg --out restored
# For GPUs begin with an image that has PyTorch, --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime and the
# digest of that: its torch is kept.
ARG BASE=python:3.11-slim
ARG DIGEST
FROM ${BASE}@${DIGEST:?missing,see_the_first_lines_of_the_Dockerfile}
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
