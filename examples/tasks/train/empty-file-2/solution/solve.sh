#!/bin/bash
touch shape.txt
