#!/bin/bash
echo ivory >> city.txt
