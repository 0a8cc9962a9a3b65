#!/bin/bash
echo lucky copper > song.txt
