#!/bin/bash
echo velvet peach > train.txt
