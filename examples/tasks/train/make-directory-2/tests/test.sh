#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -d town ]; then
    reward=1 # the directory
elif [ -e town ] || ls -d town* */town >/dev/null 2>&1; then
    reward=0.2 # a file, or a similar name
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
