#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -x tree.sh ] && grep -q west tree.sh; then
    reward=1 # executable, content kept
elif [ -x tree.sh ]; then
    reward=0.2 # executable, content lost
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
