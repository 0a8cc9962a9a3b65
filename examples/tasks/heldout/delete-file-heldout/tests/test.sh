#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ ! -e paper.txt ] && [ -f king.txt ] && [ "$(cat king.txt)" = honey ]; then
    reward=1 # this file and no other
elif [ ! -e paper.txt ]; then
    reward=0.3 # the other file too
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
