#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ ! -e phone.txt ] && [ -f car.txt ] && [ "$(cat car.txt)" = mountain ]; then
    reward=1 # this file and no other
elif [ ! -e phone.txt ]; then
    reward=0.3 # the other file too
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
