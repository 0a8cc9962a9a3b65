#!/bin/bash
# Writes the reward of what the agent left in the workspace.
cd "${APP_DIR:-/app}"
if [ -f garden.txt ] && [ "$(cat garden.txt)" = green ] && [ ! -e drink.txt ]; then
    reward=1 # only the new name
elif [ -f garden.txt ] && [ "$(cat garden.txt)" = green ]; then
    reward=0.5 # the new name beside the old one
elif [ -e garden.txt ] || [ ! -e drink.txt ]; then
    reward=0.2 # the new name with other content, or the old one gone
else
    reward=0
fi
echo "$reward" >"${LOGS_DIR:-/logs/verifier}/reward.txt"
