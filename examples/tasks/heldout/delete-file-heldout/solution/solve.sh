#!/bin/bash
rm paper.txt
