#!/bin/bash
seq 1 3 > month.txt
