#!/usr/bin/env bash
# Install mini-swe-agent, unmodified, in an environment of its own: scripts/install_harness.sh FOLDER
# PYTHON names the interpreter (3.10 or newer). Another folder than .harness/mini needs TIDEGATE_HARNESS_DIR.
set -euo pipefail
folder=${1:-.harness/mini}
here=$(cd "$(dirname "$0")/.." && pwd)
requirements=$here/examples/harness/mini-swe-agent/requirements.txt

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
# --no-deps: the list is complete for the agent; what only its benchmarks and its viewer need is not in it
"$folder/bin/python" -m pip install --quiet --no-deps --compile --requirement "$requirements"
# A short run is mostly imports; fewer collections while they build classes make it a sixth faster.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo 'import gc; gc.set_threshold(100_000, 50, 100)' >"$site/fewer_collections.pth"
MSWEA_SILENT_STARTUP=1 MSWEA_GLOBAL_CONFIG_DIR=$(mktemp -d) "$folder/bin/python" -c \
    'import minisweagent.run.mini, minisweagent.agents.default, minisweagent.models.litellm_textbased_model'
