#!/bin/bash
echo banana green > queen.txt
