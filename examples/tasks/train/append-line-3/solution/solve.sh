#!/bin/bash
echo violet >> cheese.txt
