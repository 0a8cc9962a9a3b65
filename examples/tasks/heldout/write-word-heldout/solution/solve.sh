#!/bin/bash
echo tomato > cat.txt
