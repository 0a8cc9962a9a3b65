#!/bin/bash
echo melon >> sun.txt
