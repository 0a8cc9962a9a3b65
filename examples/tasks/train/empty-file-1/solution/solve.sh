#!/bin/bash
touch farm.txt
