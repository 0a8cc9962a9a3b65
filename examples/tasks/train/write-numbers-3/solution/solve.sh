#!/bin/bash
seq 1 6 > season.txt
