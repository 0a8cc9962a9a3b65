#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f queen.txt ] && [ "$(cat queen.txt)" = 'banana green' ]; then
    reward=1 # both words, in order
elif [ -f queen.txt ] && grep -qi -e banana -e green queen.txt; then
    reward=0.5 # one word, or both and more
elif [ -f queen.txt ]; then
    reward=0.2 # the file, without the words
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
