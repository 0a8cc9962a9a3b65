#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f rain/night.txt ]; then
    reward=1 # the file in the directory
elif [ -d rain ]; then
    reward=0.4 # only the directory
elif [ -f night.txt ]; then
    reward=0.2 # only the file, elsewhere
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
