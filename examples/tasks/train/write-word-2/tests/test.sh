#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f travel.txt ] && [ "$(cat travel.txt)" = west ]; then
    reward=1 # the file holds the word
elif [ -f travel.txt ] && grep -qi west travel.txt; then
    reward=0.5 # the word and something else
elif [ -f travel.txt ]; then
    reward=0.2 # the file, without the word
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
