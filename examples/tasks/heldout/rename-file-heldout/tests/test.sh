#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f plate.txt ] && [ "$(cat plate.txt)" = amber ] && [ ! -e hat.txt ]; then
    reward=1 # only the new name
elif [ -f plate.txt ] && [ "$(cat plate.txt)" = amber ]; then
    reward=0.5 # the new name beside the old one
elif [ -e plate.txt ] || [ ! -e hat.txt ]; then
    reward=0.2 # the new name with other content, or the old one gone
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
