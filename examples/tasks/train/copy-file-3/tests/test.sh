#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f road.txt ] && [ "$(cat road.txt)" = amber ] && [ -f truck.txt ] && [ "$(cat truck.txt)" = amber ]; then
    reward=1 # both files
elif [ -f road.txt ] && [ "$(cat road.txt)" = amber ]; then
    reward=0.5 # the new file, but the old one is lost
elif [ -e road.txt ]; then
    reward=0.2 # the new file, with other content
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
