# The image of every pod of ours: driver, workers, submitter, MLflow server. A plain install of the tested versions.
FROM python:3.11.14-slim-bookworm

# A compiler for Triton and Inductor, git for the winner's commit, user-space RDMA for NCCL, wget for KubeRay's probes.
# Debian removes old versions from its archive, so pinning these would break the build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git ibverbs-providers libibverbs1 librdmacm1 wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/ledgertune
COPY requirements.lock requirements-image.lock ./
RUN python -m pip install --no-cache-dir -r requirements.lock -r requirements-image.lock
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --uid 1000 --no-create-home --home-dir /tmp tune

ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    MLFLOW_DISABLE_TELEMETRY=true
# A number, so that Kubernetes can see that it is not root.
USER 1000:1000
WORKDIR /tmp
CMD ["tune", "--help"]
