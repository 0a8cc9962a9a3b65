#!/bin/bash
mkdir tool && touch tool/fish.txt
