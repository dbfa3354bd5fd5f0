# Server, MLflow and cpu worker: everything but a GPU. Build from the repository's root:
#   docker build -f infra/images/ops.Dockerfile -t sqltrain-ops .
# There is no git in it: --build-arg SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SQLTRAIN=0.1.0 gives the version, else it is 0.0+unknown.
# Not run here: this project's machines have no container engine. tests/infra/ parses it.
FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    SQLTRAIN_HOME=/srv/sqltrain \
    SQLTRAIN_STORE=/store

WORKDIR /srv/sqltrain
RUN useradd --create-home --uid 10001 sqltrain && mkdir /store && chown sqltrain /store

# The CPU build of torch first: the default one brings gigabytes of CUDA.
COPY pyproject.toml constraints.txt ./
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt torch

COPY pipelines pipelines
COPY tasks tasks
COPY flows flows
COPY conf conf
COPY infra infra
ARG SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SQLTRAIN
RUN pip install -c constraints.txt -e '.[ops,cluster,traces]'

USER sqltrain
CMD ["prefect", "worker", "start", "--pool", "cpu"]
