#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f song.txt ] && [ "$(cat song.txt)" = 'lucky copper' ]; then
    reward=1 # both words, in order
elif [ -f song.txt ] && grep -qi -e lucky -e copper song.txt; then
    reward=0.5 # one word, or both and more
elif [ -f song.txt ]; then
    reward=0.2 # the file, without the words
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
