# The orchestrator, and the command line as a client of it. No torch, no compiler.
#   docker build -f docker/orchestrator.Dockerfile -t coppice/orchestrator:0.1.0 .
# A release pins its base by digest: --build-arg PYTHON_IMAGE=python:3.13-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/coppice
COPY pyproject.toml README.md LICENSE ./
COPY coppice coppice
COPY orchestrator orchestrator
COPY conformance conformance
RUN pip --python /opt/coppice/bin/python install --no-cache-dir ".[redis,traces]"

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/coppice /opt/coppice
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp coppice
ENV PATH=/opt/coppice/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
# A number: only of a number Kubernetes knows that it is not root.
USER 65532:65532
EXPOSE 50050
ENTRYPOINT ["python", "-m", "orchestrator"]
