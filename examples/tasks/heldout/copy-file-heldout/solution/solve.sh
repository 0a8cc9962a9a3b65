#!/bin/bash
cp flag.txt planet.txt
