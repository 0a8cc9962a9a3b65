#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f month.txt ] && [ "$(cat month.txt)" = $'1\n2\n3' ]; then
    reward=1 # the numbers, one on each line
elif [ -f month.txt ] && grep -q 1 month.txt && grep -q 3 month.txt; then
    reward=0.5 # the numbers, otherwise placed
elif [ -f month.txt ]; then
    reward=0.2 # the file, with other content
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
