#!/bin/bash
echo apple > table.txt
