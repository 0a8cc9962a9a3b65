#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -d book ]; then
    reward=1 # the directory
elif [ -e book ] || ls -d book* */book >/dev/null 2>&1; then
    reward=0.2 # a file, or a similar name
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
