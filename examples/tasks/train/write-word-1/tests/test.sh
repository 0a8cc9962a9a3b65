#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f table.txt ] && [ "$(cat table.txt)" = apple ]; then
    reward=1 # the file holds the word
elif [ -f table.txt ] && grep -qi apple table.txt; then
    reward=0.5 # the word and something else
elif [ -f table.txt ]; then
    reward=0.2 # the file, without the word
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
