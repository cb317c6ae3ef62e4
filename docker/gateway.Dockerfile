# The HTTP gateway. No torch, no compiler.
#   docker build -f docker/gateway.Dockerfile -t coppice/gateway:0.1.0 .
# A release pins its base by digest: --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
# What is installed is what the locks say, version and hash, and nothing else: `make lock` writes them.
COPY docker/locks/build.txt docker/locks/gateway.txt ./
RUN python -m venv --without-pip /opt/coppice && \
    pip install --no-cache-dir --require-hashes --no-deps --only-binary :all: -r build.txt && \
    pip --python /opt/coppice/bin/python install --no-cache-dir --require-hashes --no-deps --only-binary :all: \
    -r gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY coppice coppice
RUN pip wheel --quiet --no-cache-dir --no-deps --no-build-isolation --wheel-dir dist . && \
    pip --python /opt/coppice/bin/python install --no-cache-dir --no-deps dist/*.whl && \
    pip --python /opt/coppice/bin/python check

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/coppice /opt/coppice
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp coppice
ENV PATH=/opt/coppice/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
# A number: only of a number Kubernetes knows that it is not root.
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["python", "-m", "coppice.gateway"]
