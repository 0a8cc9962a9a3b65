#!/bin/bash
mkdir rain && touch rain/night.txt
