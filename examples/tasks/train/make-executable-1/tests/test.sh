#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -x wind.sh ] && grep -q corn wind.sh; then
    reward=1 # executable, content kept
elif [ -x wind.sh ]; then
    reward=0.2 # executable, content lost
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
