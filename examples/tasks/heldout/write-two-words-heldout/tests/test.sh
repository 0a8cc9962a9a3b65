#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f train.txt ] && [ "$(cat train.txt)" = 'velvet peach' ]; then
    reward=1 # both words, in order
elif [ -f train.txt ] && grep -qi -e velvet -e peach train.txt; then
    reward=0.5 # one word, or both and more
elif [ -f train.txt ]; then
    reward=0.2 # the file, without the words
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
