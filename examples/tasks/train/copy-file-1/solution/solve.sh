#!/bin/bash
cp window.txt game.txt
