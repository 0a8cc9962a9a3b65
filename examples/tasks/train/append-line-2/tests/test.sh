#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f park.txt ] && [ "$(cat park.txt)" = $'eagle\nmountain' ]; then
    reward=1 # the new line below the old one
elif grep -q eagle park.txt && grep -q mountain park.txt; then
    reward=0.5 # both lines, otherwise placed
elif grep -q mountain park.txt; then
    reward=0.2 # the new line, but the old one is lost
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
