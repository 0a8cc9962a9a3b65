#!/bin/bash
cp truck.txt road.txt
