#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f shape.txt ] && [ ! -s shape.txt ]; then
    reward=1 # the file, empty
elif [ -f shape.txt ]; then
    reward=0.3 # the file, not empty
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
