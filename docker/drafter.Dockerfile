# A drafter of any kind, with the bundled small language model. No compiler.
#   docker build -f docker/drafter.Dockerfile -t coppice/drafter:0.1.0 .
#   docker build -f docker/drafter.Dockerfile --build-arg TORCH_BACKEND=cu130 -t coppice/drafter:0.1.0-cuda .
# A release pins its base by digest: --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# A build of torch, as uv names it.
ARG TORCH_BACKEND=cpu
# Within what pyproject.toml allows.
ARG TORCH_VERSION=2.13.0
WORKDIR /src
# What is installed is what the locks say, version and hash, and nothing else: `make lock` writes them.
COPY docker/locks/build.txt docker/locks/drafter.txt ./
RUN python -m venv --without-pip /opt/coppice && \
    pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: -r build.txt
RUN uv pip install --no-cache --compile-bytecode --python /opt/coppice/bin/python \
    --require-hashes --no-deps --only-binary :all: -r drafter.txt
# Not in the lock: its builds for CPUs and for CUDA are different files of one version, on an index of its own.
RUN uv pip install --no-cache --compile-bytecode --python /opt/coppice/bin/python \
    --torch-backend ${TORCH_BACKEND} "torch==${TORCH_VERSION}"
COPY pyproject.toml README.md LICENSE ./
COPY coppice coppice
COPY drafter_svc drafter_svc
RUN pip wheel --quiet --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . && \
    uv pip install --no-cache --compile-bytecode --python /opt/coppice/bin/python --no-deps dist/*.whl && \
    uv pip check --python /opt/coppice/bin/python

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/coppice /opt/coppice
COPY models/small-lm /models/small-lm
# Have the embeddings of the one above.
COPY models/boost-1 /models/boost-1
COPY models/semi-ar /models/semi-ar
COPY models/diffusion /models/diffusion
COPY models/eagle-smollm2 /models/eagle-smollm2
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp coppice
# Weights come from a directory, never from a hub.
ENV PATH=/opt/coppice/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
WORKDIR /tmp
# A number: only of a number Kubernetes knows that it is not root.
USER 65532:65532
EXPOSE 50052
ENTRYPOINT ["python", "-m", "drafter_svc"]
