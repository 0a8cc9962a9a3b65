#!/bin/bash
# Reward: the share of vowels among the characters of the answer.
answer=${APP_DIR:-/app}/answer.txt
total=0 vowels=0
if [ -f "$answer" ]; then
    total=$(wc -c <"$answer")
    vowels=$(tr -cd 'aeiou' <"$answer" | wc -c)
fi
awk -v v="$vowels" -v t="$total" 'BEGIN { print (t > 0 ? v / t : 0) }' >"${LOGS_DIR:-/logs/verifier}/reward.txt"
