#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f coin.txt ] && [ "$(cat coin.txt)" = $'1\n2\n3\n4\n5' ]; then
    reward=1 # the numbers, one on each line
elif [ -f coin.txt ] && grep -q 1 coin.txt && grep -q 5 coin.txt; then
    reward=0.5 # the numbers, otherwise placed
elif [ -f coin.txt ]; then
    reward=0.2 # the file, with other content
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
