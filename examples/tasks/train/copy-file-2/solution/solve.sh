#!/bin/bash
cp box.txt water.txt
