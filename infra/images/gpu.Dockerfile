# GPU worker: flows run from the ops environment, training in one of its own (vLLM and Prefect cannot share one).
#   docker build -f infra/images/gpu.Dockerfile -t sqltrain-gpu .
# There is no git in it: --build-arg SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SQLTRAIN=0.1.0 gives the version, else it is 0.0+unknown.
# A form for it sets hardware.python=/opt/gpu/bin/python, which SQLTRAIN_FORM_KEYS of all workers must allow (compose.yaml).
# CUDA is the one that gpu.lock's torch was built for: DeepSpeed compiles against it. Not run here: tests/infra/ parses it,
# and tests/services/test_locks.py resolves what both `pip install` lines ask for, on this image's Python (3.12).
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    DO_NOT_TRACK=1 \
    SQLTRAIN_HOME=/srv/sqltrain \
    SQLTRAIN_STORE=/store

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev build-essential git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 sqltrain \
    && mkdir /store && chown sqltrain /store

WORKDIR /srv/sqltrain
COPY pyproject.toml constraints.txt ./
COPY pipelines pipelines
COPY tasks tasks
COPY flows flows
COPY conf conf
COPY infra infra
ARG SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SQLTRAIN
RUN python3 -m venv /opt/ops && /opt/ops/bin/pip install -c constraints.txt -e '.[ops,traces]'
RUN python3 -m venv /opt/gpu && /opt/gpu/bin/pip install -c infra/images/gpu.lock -e '.[gpu]'

USER sqltrain
ENV PATH=/opt/ops/bin:$PATH
CMD ["prefect", "worker", "start", "--pool", "gpu", "--limit", "1"]
