#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f water.txt ] && [ "$(cat water.txt)" = south ] && [ -f box.txt ] && [ "$(cat box.txt)" = south ]; then
    reward=1 # both files
elif [ -f water.txt ] && [ "$(cat water.txt)" = south ]; then
    reward=0.5 # the new file, but the old one is lost
elif [ -e water.txt ]; then
    reward=0.2 # the new file, with other content
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
