#!/bin/bash
seq 1 5 > coin.txt
