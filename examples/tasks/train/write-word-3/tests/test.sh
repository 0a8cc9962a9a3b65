#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f desk.txt ] && [ "$(cat desk.txt)" = coral ]; then
    reward=1 # the file holds the word
elif [ -f desk.txt ] && grep -qi coral desk.txt; then
    reward=0.5 # the word and something else
elif [ -f desk.txt ]; then
    reward=0.2 # the file, without the word
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
